"""Compare the jobs with the records that they left."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median

from django_dbqueue.models import Execution, Job, RecurringExecution

from ..models import Effect, Interval
from .load import SCHEDULE, Load
from .operators import Operators
from .promises import broken
from .tasks import effect_before_expiry
from .watch import Watch

# Ends of an attempt after which the job may run again.
EXCUSES = {"lost", "interrupted", "failed", "timed_out"}


@dataclass
class Report:
    """``lost``, ``unexplained`` and each of ``broken`` must be empty. Jobs are named by their ids."""

    enqueued: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    reruns: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    broken: dict[str, list[str]] = field(default_factory=dict)
    of_which: dict[str, int] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return not self.lost and not self.unexplained and not any(self.broken.values())

    def lines(self) -> list[str]:
        ends = ", ".join(f"{number:,} {state}" for state, number in sorted(self.finished.items()))
        why = ", ".join(
            f"{number:,} after {outcome.replace('_', ' ')}"
            for outcome, number in sorted(self.reruns.items())
        )
        longest = (
            f"{max(self.recoveries):.1f} s (median {median(self.recoveries):.1f} s)"
            if self.recoveries
            else "–"
        )
        return [
            f"enqueued                   {self.enqueued:,}",
            f"finished                   {sum(self.finished.values()):,} ({ends})",
            f"lost                       {len(self.lost)} {self.lost[:5] or ''}",
            f"reruns                     {sum(self.reruns.values()):,} ({why})",
            f"unexplained reruns         {len(self.unexplained)} {self.unexplained[:5] or ''}",
            *(f"{name:26} {len(found)} {found[:5] or ''}" for name, found in self.broken.items()),
            f"longest stalls             {', '.join(f'{what} {s:.0f} s' for what, s in self.longest.items()) or '–'}",
            f"included                   {', '.join(f'{number:,} {what}' for what, number in self.of_which.items())}",
            f"kill to recovery, longest  {longest}",
        ]


def report(
    load: Load,
    operators: Operators,
    watch: Watch,
    killed_at: dict[int, datetime],
    deadlocks: list[str],
) -> Report:
    """Report on ``load``'s committed jobs. ``deadlocks``: entries of the server's log."""
    confirmed = load.confirmed
    jobs = {
        str(job.pk): job
        for job in Job.objects.only("pk", "state", "task", "attempt", "key", "stage")
    }
    outcomes: defaultdict[str, dict[int, str]] = defaultdict(dict)
    result = Report(
        enqueued=len(confirmed),
        finished=Counter(job.state for pk, job in jobs.items() if pk in confirmed),
    )
    for execution in Execution.objects.defer("message", "traceback", "log"):
        outcomes[str(execution.job_id)][execution.attempt] = execution.outcome
        pid = int(execution.process.split(":")[1]) if execution.process.count(":") == 2 else 0
        # Process ids are reused: the attempt must have started before the kill.
        killed = killed_at.get(pid)
        if (
            execution.outcome in ("lost", "interrupted")
            and killed
            and execution.claimed_at <= killed
        ):
            result.recoveries.append(max(0.0, (execution.finished_at - killed).total_seconds()))
    result.lost = [
        pk
        for pk in confirmed
        if pk not in jobs or jobs[pk].state not in ("successful", "failed", "discarded")
    ]
    effects: defaultdict[str, list[int]] = defaultdict(list)
    for job, attempt in Effect.objects.values_list("job", "attempt"):
        effects[job].append(attempt)
    for pk in set(effects) | set(outcomes):
        # Jobs with keys or pipelines also run again after a success; promises.py checks them.
        if pk in jobs and (jobs[pk].key or jobs[pk].stage is not None):
            result.reruns.update(outcome for outcome in outcomes[pk].values() if outcome in EXCUSES)
        else:
            excuses = EXCUSES | ({"discarded", "stopped"} if pk in operators.retried else set())
            result.unexplained += _check(
                pk, jobs.get(pk), sorted(effects[pk]), outcomes[pk], result.reruns, excuses
            )
    failed = [
        pk
        for pk, job in jobs.items()
        if job.state == "failed" and not job.task.endswith(("effect_once", "effect_before_expiry"))
    ]
    result.longest = watch.longest
    result.broken = {
        "unexpected failures": failed,
        **broken(load, operators, watch),
        "deadlocks": deadlocks,
    }
    expiring = Job.objects.filter(task=effect_before_expiry.module_path)
    result.of_which = {
        "limited attempts": Interval.objects.count(),
        "versions of keys": sum(load.versions.values()),
        "pipelines": Job.objects.filter(pipeline__isnull=False).count(),
        "batches": len(load.batches),
        "with keys": len(load.members),
        "expiring jobs": expiring.count(),
        "expired": expiring.filter(state="discarded").count(),
        "schedule times": RecurringExecution.objects.filter(task__name=SCHEDULE).count(),
        "debounced calls": sum(map(len, load.put_off.values())),
        "jobs retried by operators": len(operators.retried),
        "stall samples": watch.samples,
    }
    return result


def _check(
    pk: str,
    job: Job | None,
    attempts: list[int],
    outcomes: dict[int, str],
    reruns: Counter[str],
    excuses: set[str],
) -> list[str]:
    """Return the unexplained facts about one job's attempts."""
    if job is None:
        return [f"{pk}: left a mark, but its row is missing"]
    found = []
    for attempt, outcome in outcomes.items():
        if attempt != max(outcomes):
            reruns[outcome] += 1
            if outcome not in excuses:
                found.append(f"{pk}: ran again after attempt {attempt} was {outcome}")
    # context.attempt counts the earlier executions and this one.
    if len(attempts) > len(outcomes):
        found.append(f"{pk}: ran {len(attempts)} times, with {len(outcomes)} executions")
    if Counter(outcomes.values())["successful"] > 1:
        found.append(f"{pk}: was successful more than once")
    once = job.task.endswith(("effect_with_its_end", "effect_once"))
    if once and len(attempts) > 1:
        found.append(f"{pk}: {job.task} left its mark {len(attempts)} times")
    if job.task.endswith("effect_with_its_end") and (job.state == "successful") != (
        len(attempts) == 1
    ):
        found.append(f"{pk}: {job.task} is {job.state}, with {len(attempts)} marks")
    return found
