"""Metrics of a queue for Prometheus. Needs ``prometheus-client``: the extra ``prometheus``."""

from __future__ import annotations

import hmac
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timezone
from functools import cached_property, partial
from typing import TYPE_CHECKING

from django.conf import settings
from django.db import Error
from django.http import HttpRequest, HttpResponse
from django.utils.timezone import now
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ..backend import DatabaseBackend
from ..compat import task_backends
from ..core.counts import BOUNDS, Counts, Times
from ..doctor.database import QueueDatabase, queue_databases
from ..doctor.queue import overdue_rows
from ..doctor.runner import examine
from ..models import Failure, Job, Process, Queue, Statistic
from ..models.bounded_count import LIMIT, count
from ..models.enums import State
from ..models.queue import Load
from ..runtime.connections import close_connections
from ..runtime.logging_setup import RepeatedProblem
from ..signals import dispatcher_exited, worker_exited

if TYPE_CHECKING:
    from ..runtime.supervisor.supervisor import Supervisor

__all__ = ["QueueCollector", "metrics_view"]

PERMISSION = "dbqueue.view_job"
FIRST_DIGITS = ("1.0", "2.0", "5.0")
# The upper bounds of the buckets that Prometheus gets, in seconds. All are in BOUNDS.
BUCKETS = tuple(
    each for each in BOUNDS if 0.005 <= each <= 5000 and f"{each:.1e}"[:3] in FIRST_DIGITS
)
# The states that are numbers of a Load.
LOADED = (State.READY, State.SCHEDULED, State.BLOCKED, State.RUNNING)
OTHERS = "(others)"
# The longest wait for metrics that another thread is reading, in seconds.
PATIENCE = 5.0
BY_TASK = ("database", "queue", "task")


class QueueCollector(Collector):
    """Read the metrics of the queue's databases. Register it in a ``CollectorRegistry``.

    backends: the aliases in ``TASKS``; by default all of a DatabaseBackend.
    cached: the seconds for which metrics are kept, however often they are asked for.
    examined_every: the seconds between two runs of the checks of ``checkqueue``.
    most: the number of queues, and of pairs of a queue and a task, with metrics of their own. The
        others, last in the alphabet, are added up as "(others)".

    Raises ValueError for an alias without a DatabaseBackend. Counters begin again at midnight UTC.
    """

    def __init__(
        self,
        backends: Iterable[str] = (),
        *,
        cached: float = 5.0,
        examined_every: float = 60.0,
        most: int = 500,
    ) -> None:
        self._backends, self._most = _backends(list(backends)), most
        self._cached, self._examined_every = cached, examined_every
        self._lock, self._read_at, self._found = threading.Lock(), float("-inf"), list[Metric]()

    def collect(self) -> list[Metric]:
        """Return the metrics. ``dbqueue_up`` is 0 for a database that cannot be read."""
        # A database that does not answer must not collect the threads of a server.
        if not self._lock.acquire(timeout=PATIENCE):
            return [_up({each.alias: False for each in self._databases})]
        try:
            if time.monotonic() - self._read_at >= self._cached:
                self._found = self._read()
                self._read_at = time.monotonic()
            return self._found
        finally:
            self._lock.release()

    def describe(self) -> list[Metric]:
        """Return nothing: the registry must not read the database when it is set up."""
        return []

    @cached_property
    def _databases(self) -> list[_Database]:
        # Not in the constructor: options that are invalid must not keep urls.py from loading.
        return [_Database(each, self._most) for each in queue_databases(self._backends)]

    def _read(self) -> list[Metric]:
        families: dict[str, Metric] = {}
        is_up: dict[str, bool] = {}
        for each in self._databases:
            try:
                found = list(each.metrics(self._examined_every))
                each.problem.over()
            except Error as error:
                each.problem.report(error)
                found = []
            is_up[each.alias] = bool(found)
            for metric in found:
                if other := families.get(metric.name):
                    other.samples += metric.samples
                else:
                    families[metric.name] = metric
        return [_up(is_up), *families.values()]


class _Database:
    """The metrics of one database."""

    def __init__(self, database: QueueDatabase, most: int) -> None:
        self._database, self._most = database, most
        self.alias = database.alias
        self.problem = RepeatedProblem(f"metrics: {self.alias} could not be read")
        self._problems: list[tuple[str, str]] = []
        self._examined_at = float("-inf")

    def metrics(self, examined_every: float) -> Iterator[Metric]:
        with self._database.bounded():
            yield from self._by_queue()
            yield from self._of_processes()
            yield from self._counted()
        yield self._of_problems(examined_every)

    def _by_queue(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily(
            "dbqueue_jobs",
            f"Jobs that have not ended well, by state. No state is counted beyond {LIMIT:,}.",
            labels=["database", "queue", "state"],
        )
        age = GaugeMetricFamily(
            "dbqueue_oldest_ready_job_age_seconds",
            "Time since the oldest ready job could have run; 0 without one.",
            labels=["database", "queue"],
        )
        paused = GaugeMetricFamily(
            "dbqueue_queue_paused",
            "Whether no jobs are claimed from the queue.",
            labels=["database", "queue"],
        )
        workers = GaugeMetricFamily(
            "dbqueue_queue_workers",
            "Live worker processes that serve the queue.",
            labels=["database", "queue"],
        )
        queues = Queue.objects.using(self.alias)
        loads = queues.loads(self._database.jobs.lanes())
        pauses = {each.name: each.is_paused(each.seen_at) for each in queues.seen()}
        alive = list(Process.objects.using(self.alias).workers())
        failed = self._failed()
        numbers: dict[str, Counter[State]] = {}
        ages: defaultdict[str, float] = defaultdict(float)
        for place, name in enumerate(sorted({*loads, *pauses, *failed})):
            label, load = name if place < self._most else OTHERS, loads.get(name, Load())
            of_label = numbers.setdefault(label, Counter())
            of_label.update({state: getattr(load, state.value) for state in LOADED})
            of_label[State.FAILED] += failed[name]
            ages[label] = max(ages[label], load.age.total_seconds())
            if label == name:
                paused.add_metric([self.alias, name], pauses.get(name, False))
                workers.add_metric([self.alias, name], sum(each.serves(name) for each in alive))
        for label, of_label in numbers.items():
            for state in (*LOADED, State.FAILED):
                jobs.add_metric([self.alias, label, state.value], of_label[state])
            age.add_metric([self.alias, label], ages[label])
        yield from (jobs, age, paused, workers)

    def _failed(self) -> Counter[str]:
        rows = Job.objects.using(self.alias).filter(state=State.FAILED).order_by("finished_at")
        return Counter(rows.values_list("queue", flat=True)[:LIMIT])

    def _of_processes(self) -> Iterator[Metric]:
        processes = GaugeMetricFamily(
            "dbqueue_processes", "Live processes.", labels=["database", "kind"]
        )
        memory = GaugeMetricFamily(
            "dbqueue_processes_resident_memory_bytes",
            "Resident memory of the live processes.",
            labels=["database", "kind"],
        )
        threads = GaugeMetricFamily(
            "dbqueue_worker_threads",
            "Threads of the live workers, each of which runs a job at a time.",
            labels=["database"],
        )
        alive = list(Process.objects.using(self.alias).alive())
        for kind in Process.Kind:
            of_kind = [each for each in alive if each.kind == kind]
            processes.add_metric([self.alias, kind.value], len(of_kind))
            memory.add_metric([self.alias, kind.value], sum(each.memory or 0 for each in of_kind))
        threads.add_metric([self.alias], sum(each.threads for each in alive))
        failures = GaugeMetricFamily(
            "dbqueue_open_failures", "Failures that are open.", labels=["database"]
        )
        failures.add_metric([self.alias], Failure.objects.using(self.alias).open().count())
        overdue = GaugeMetricFamily(
            "dbqueue_overdue_recurring_tasks",
            "Recurring tasks whose time has passed, or which cannot be enqueued.",
            labels=["database"],
        )
        overdue.add_metric([self.alias], count(overdue_rows(self._database)))
        yield from (processes, memory, threads, failures, overdue)

    def _counted(self) -> Iterator[Metric]:
        """Yield the counts since midnight: each process that is asked gives the same ones."""
        enqueued = CounterMetricFamily(
            "dbqueue_jobs_enqueued", "Jobs that were enqueued.", labels=BY_TASK
        )
        attempts = CounterMetricFamily(
            "dbqueue_attempts", "Attempts that ended.", labels=(*BY_TASK, "outcome")
        )
        retries = CounterMetricFamily(
            "dbqueue_retries", "Attempts that followed a failed one.", labels=BY_TASK
        )
        duration = HistogramMetricFamily(
            "dbqueue_attempt_duration_seconds",
            "Time from the start of an attempt to its end.",
            labels=BY_TASK,
        )
        wait = HistogramMetricFamily(
            "dbqueue_attempt_wait_seconds",
            "Time from when an attempt was due to its start.",
            labels=BY_TASK,
        )
        for (queue, task), counts in self._counts().items():
            labels = [self.alias, queue, task]
            enqueued.add_metric(labels, counts.enqueued)
            attempts.add_metric([*labels, "succeeded"], counts.runs - counts.failures)
            attempts.add_metric([*labels, "failed"], counts.failures)
            retries.add_metric(labels, counts.retries)
            duration.add_metric(labels, *_histogram(counts.run_time))
            wait.add_metric(labels, *_histogram(counts.wait_time))
        yield from (enqueued, attempts, retries, duration, wait)

    def _counts(self) -> Mapping[tuple[str, str], Counts]:
        midnight = now().astimezone(timezone.utc) if settings.USE_TZ else now()
        midnight = midnight.replace(hour=0, minute=0, second=0, microsecond=0)
        found = Statistic.objects.using(self.alias).per_queue_and_task(midnight)
        names = sorted(found)
        kept = {name: found[name] for name in names[: self._most]}
        if rest := names[self._most :]:
            others = kept[OTHERS, OTHERS] = Counts()
            for name in rest:
                others.merge(found[name])
        return kept

    def _of_problems(self, examined_every: float) -> Metric:
        problems = GaugeMetricFamily(
            "dbqueue_problems",
            "What checkqueue finds, by check. Of severity critical: jobs do not run.",
            labels=["database", "check", "severity"],
        )
        if time.monotonic() - self._examined_at >= examined_every:
            self._problems = [
                (check, found.severity.value)
                for check, found in examine(self._database)
                if found.severity
            ]
            self._examined_at = time.monotonic()
        for (check, severity), number in sorted(Counter(self._problems).items()):
            problems.add_metric([self.alias, check, severity], number)
        return problems


def _up(is_up: Mapping[str, bool]) -> Metric:
    up = GaugeMetricFamily(
        "dbqueue_up", "Whether the queue's tables could be read.", labels=["database"]
    )
    for alias, value in is_up.items():
        up.add_metric([alias], value)
    return up


def serve(address: str, port: int, supervisors: Sequence[Supervisor]) -> None:
    """Serve the metrics over HTTP, from a thread of this process, with those of its children.

    Raises OSError if the port cannot be used.
    """
    registry = CollectorRegistry()
    registry.register(_ReadInThread(QueueCollector(each.alias for each in supervisors)))
    registry.register(_WorkerCollector(supervisors))
    exits = PrometheusCounter(
        "dbqueue_child_exits", "Processes of this runqueue that ended.", ["role"], registry=registry
    )
    for role, signal in (("worker", worker_exited), ("dispatcher", dispatcher_exited)):
        signal.connect(partial(_count, exits.labels(role)), weak=False)
    start_http_server(port, address, registry)


def _count(exits: PrometheusCounter, **kwargs: object) -> None:
    exits.inc()


class _WorkerCollector(Collector):
    """What the workers of this runqueue count and measure, by backend."""

    def __init__(self, supervisors: Sequence[Supervisor]) -> None:
        self._supervisors = supervisors

    def collect(self) -> Iterator[Metric]:
        measures = {each.alias: each.worker_measures() for each in self._supervisors}
        claims = CounterMetricFamily(
            "dbqueue_worker_claims",
            "Rounds in which workers looked for jobs, by whether they claimed any.",
            labels=["backend", "found"],
        )
        for alias, of in measures.items():
            claims.add_metric([alias, "yes"], of.get("claims", 0.0))
            claims.add_metric([alias, "no"], of.get("empty_claims", 0.0))
        yield claims
        for family, name, text in (
            (CounterMetricFamily, "claimed_jobs", "Jobs that workers claimed."),
            (CounterMetricFamily, "settles", "Transactions in which results were written."),
            (CounterMetricFamily, "settled_jobs", "Jobs whose results were written."),
            (GaugeMetricFamily, "active_threads", "Threads that take jobs at the moment."),
            (GaugeMetricFamily, "running_jobs", "Jobs that run."),
            (GaugeMetricFamily, "unsettled_jobs", "Jobs that have ended and are not written yet."),
        ):
            metric = family(f"dbqueue_worker_{name}", text, labels=["backend"])
            for alias, of in measures.items():
                metric.add_metric([alias], of.get(name, 0.0))
            yield metric
        delay = GaugeMetricFamily(
            "dbqueue_worker_poll_delay_seconds",
            "The longest delay of a worker before it looks for jobs again.",
            labels=["backend"],
        )
        for alias, of in measures.items():
            delay.add_metric([alias], of["poll_delay"])
        yield delay

    def describe(self) -> list[Metric]:
        return []


class _ReadInThread(Collector):
    """A collector for a server that has a thread, and thus connections, for each request."""

    def __init__(self, collector: QueueCollector) -> None:
        self._collector = collector

    def collect(self) -> list[Metric]:
        try:
            return self._collector.collect()
        finally:
            close_connections()

    def describe(self) -> list[Metric]:
        return []


def metrics_view(
    *, token: str | None = None, collector: QueueCollector | None = None
) -> Callable[[HttpRequest], HttpResponse]:
    """Return a view of the metrics, for ``urls.py``.

    token: the bearer token of requests that may read the metrics. Staff with the permission to view
        jobs may read them too; without a token, only they.
    collector: by default one of all backends.

    Raises ValueError for an empty token: it would permit any request.
    """
    if token is not None and not token.strip():
        raise ValueError(
            f"token={token!r} is empty. Give a secret, or None for users with the permission "
            f"{PERMISSION} only."
        )
    registry = CollectorRegistry()
    registry.register(collector or QueueCollector())

    def metrics(request: HttpRequest) -> HttpResponse:
        if not (_has_token(request, token) or _may_view(request)):
            challenge = {"WWW-Authenticate": "Bearer"} if token else {}
            text = f"Send the token, or sign in as staff with the permission {PERMISSION}.\n"
            return HttpResponse(text, "text/plain", status=401 if token else 403, headers=challenge)
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return HttpResponse(encode(registry), content_type, headers={"Cache-Control": "no-store"})

    return metrics


def _has_token(request: HttpRequest, token: str | None) -> bool:
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    return (
        token is not None
        and kind.lower() == "bearer"
        and hmac.compare_digest(given.strip().encode(), token.encode())
    )


def _may_view(request: HttpRequest) -> bool:
    user = getattr(request, "user", None)
    return bool(user and user.is_active and user.is_staff and user.has_perm(PERMISSION))


def _backends(aliases: list[str]) -> list[DatabaseBackend]:
    every = (task_backends[alias] for alias in aliases or task_backends)
    backends = [each for each in every if isinstance(each, DatabaseBackend)]
    if unfit := sorted({*aliases} - {each.alias for each in backends}):
        raise ValueError(f"TASKS[{unfit[0]!r}] is not a DatabaseBackend: it has no metrics.")
    return backends


def _histogram(times: Times) -> tuple[list[tuple[str, float]], float]:
    """Return the cumulative buckets of a histogram, and its sum."""
    numbers = Counter[int]()
    for place, number in times.buckets.items():
        # The bucket with the bound, or the next higher one.
        bound = BOUNDS[place] if place < len(BOUNDS) else float("inf")
        numbers[bisect_left(BUCKETS, bound)] += number
    total, found = 0, []
    for place, bound in enumerate((*BUCKETS, float("inf"))):
        total += numbers[place]
        found.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
    return found, times.sum
