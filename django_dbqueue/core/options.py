"""``TASKS[alias]["OPTIONS"]`` and the flags of ``runqueue``, as one frozen object.

The object is validated before any use.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

from ..backoff import Backoff, Exponential
from ..exceptions import InvalidOption, InvalidSchedule
from ..recurrence.rule import Recurrence
from ..signals import __all__ as SIGNALS
from . import release
from .alert_targets import AlertTarget, problems_of_alerts
from .option_values import FOREVER, INSTANT, as_names, is_path, must_know

# The largest value that the job's column holds on every database.
MOST_ATTEMPTS = 32767
# More processes or threads than this are a mistake: each has a database connection.
MOST_AT_A_TIME = 1000
# What four bytes hold.
MOST_WHOLE = 2**31 - 1
DAY = 86_400.0
# When ``enqueue()`` writes a job. The first is the default.
ENQUEUE = ("in_transaction", "on_commit")
_NAME = re.compile(r"[\w.-]{0,50}")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
# Options that ``per_queue`` accepts.
OF_A_QUEUE = (
    *("max_attempts", "backoff", "enqueue", "timeout", "limit", "hanged_after", "ready_within"),
    *("keep_successful", "keep_failed", "delete_on_success", "keep_log"),
)
# What an entry of ``recurring`` accepts: text, flags, and the rest.
TEXTS_OF_A_SCHEDULE = ("task", "command", "queue_name")
FLAGS_OF_A_SCHEDULE = ("enabled", "drift")
OF_A_SCHEDULE = (
    *TEXTS_OF_A_SCHEDULE,
    *("cron", "every", "timezone", "args", "kwargs", "priority"),
    *("missed", "most_missed", "jitter", "starts_at", "ends_at"),
    *FLAGS_OF_A_SCHEDULE,
)
# Options that a group in ``workers`` accepts.
OF_A_GROUP = (
    *("queues", "processes", "threads", "coroutines", "prefetch", "prefetch_bytes"),
    *("max_jobs", "max_age", "max_memory", "poll_interval"),
)
# Options that are lists of names.
OF_NAMES = {
    *("queues", "task_modules", "hidden", "allow_sql", "allow_commands"),
    *("indexed_arguments", "middleware"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for storing and running a backend's jobs. Times are in seconds.

    The task's own value takes precedence over max_attempts, backoff, enqueue, timeout and
    delete_on_success.

    database: the alias of the database that holds the queue; None asks the project's database
        routers.
    max_attempts: the number of attempts before a job is FAILED.
    backoff: the delay between two attempts.
    enqueue: when a job is written: "in_transaction" (in the caller's transaction of the queue's
        database), or "on_commit" (once all of the caller's open transactions have committed).
    timeout: the longest time that a job may run; None for no timeout.
    per_queue: other values for the jobs of some queues: ``{"mail": {"timeout": 30}}``.
    recurring: recurring tasks by name: ``{"nightly": {"task": "shop.tasks.report", "cron":
        "0 3 * * *"}, "sessions": {"command": "clearsessions", "every": 3600}}``.
    task_modules: modules that hold tasks, beside the module ``tasks`` of each installed app.
    allow_import_errors: task modules that may fail to import without keeping runqueue from
        starting; True for all.
    allow_sql: the aliases of the databases on which the ready-made task ``run_sql`` may run.
    allow_commands: the management commands that the ready-made task ``call_command`` may run.
    queues: the queues that workers serve, in order: names, ``prefix*``, ``*``, ``-name``.
    processes, threads: worker processes of one supervisor, and threads in each.
    coroutines: the number of ``async def`` tasks that a worker process runs at a time.
    prefetch: the largest number of jobs that a worker has claimed and not yet started.
    prefetch_bytes: the largest total of bytes in large arguments of these jobs; a single job may
        have more.
    workers: groups of workers, each with other values for some of these options:
        ``[{"queues": "mail*", "threads": 5, "processes": 2}, {"queues": "*"}]``; empty for one
        group with the options themselves.
    max_jobs: the number of jobs after which a worker process is replaced; None for never.
    max_age: the age after which a worker process is replaced; None for any age.
    max_memory: the resident memory, in MB of 1,048,576 bytes, above which a worker process is
        replaced; None for any size.
    poll_interval: the longest time that an idle process waits between two polls.
    timeout_grace: the time that a job has to end after its timeout, before its worker process is
        replaced and ended.
    shutdown_timeout: the time that running jobs may continue after SIGTERM, before they are
        released.
    beat_interval, dead_after: the interval between two heartbeats of a process, and the silence
        after which it is declared dead.
    give_up_after: the time that the database may be unavailable before runqueue ends, with exit
        code 1.
    unknown_task_after: the time that a job waits for a worker that knows its task, before it is
        FAILED.
    limit: the number of jobs of a queue that run at a time, over all hosts; None for any number. An
        operator's limit takes precedence.
    hanged_after: the time that a job may run before the admin lists it as hanged.
    ready_within: the time that a job may be ready before checkqueue reports its queue; None for any
        time.
    keep_successful, keep_failed: the retention of jobs that succeeded, and of jobs that failed or
        were discarded; None for ever.
    keep_statistics, keep_operations: the retention of the statistics per hour, and of the admin's
        operations, which can be undone as long; None for ever.
    release: the name of the project's release, which is kept with processes, attempts, failures and
        statistics; None takes it from the environment, as RELEASE or SENTRY_RELEASE.
    delete_on_success: keep nothing of jobs that succeed.
    keep_log: the number of last lines logged by a task that are kept with its attempt.
    note_source: record with each job the process, request, user or job that enqueues it.
    ageing: each time that a job has waited for this long, it counts as one priority higher; None
        for never.
    indexed_arguments: names of arguments and metadata that have an index, which checkqueue shows
        how to create: the admin's search for them reads all jobs. PostgreSQL only.
    hidden: words; the admin does not show values whose name contains one of them.
    embedded: everything in one process, as threads.
    name: a name for these processes, in their rows and log lines.
    silence_polling: keep the queue's own statements out of Django's SQL log; those of tasks stay.
    middleware: subclasses of ``django_dbqueue.middleware.TaskMiddleware``, or objects of them, as
        dotted paths, the outermost first: ``["shop.tenants.TenantMiddleware"]``.
    alerts: targets that are notified of problems: ``[{"mail": "ADMINS"}, {"webhook": "https://…",
        "secret": "…", "severity": "critical"}, {"function": "shop.page", "checks": ["lag"]}]``.
    receivers: receivers of the signals in ``django_dbqueue.signals``, as dotted paths:
        ``{"worker_started": "shop.monitoring.worker_started"}``, or a list of paths.
    """

    database: str | None = None
    max_attempts: int = 1
    backoff: Backoff = Exponential()
    enqueue: str = ENQUEUE[0]
    timeout: float | None = None
    per_queue: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    recurring: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    task_modules: tuple[str, ...] = ()
    allow_import_errors: bool | tuple[str, ...] = False
    allow_sql: tuple[str, ...] = ()
    allow_commands: tuple[str, ...] = ()
    queues: tuple[str, ...] = ("*",)
    processes: int = 1
    threads: int = 8
    coroutines: int = 1000
    prefetch: int = 1000
    prefetch_bytes: int = 64 * 1024 * 1024
    workers: tuple[Mapping[str, Any], ...] = ()
    max_jobs: int | None = None
    max_age: float | None = None
    max_memory: int | None = None
    poll_interval: float = 1.0
    timeout_grace: float = 5.0
    shutdown_timeout: float = 25.0
    beat_interval: float = 5.0
    dead_after: float = 30.0
    give_up_after: float = 300.0
    unknown_task_after: float = 7 * DAY
    limit: int | None = None
    hanged_after: float = 3600.0
    ready_within: float | None = 600.0
    keep_successful: float | None = 7 * DAY
    keep_failed: float | None = 90 * DAY
    keep_statistics: float | None = 90 * DAY
    keep_operations: float | None = 90 * DAY
    release: str | None = None
    delete_on_success: bool = False
    keep_log: int = 0
    note_source: bool = False
    ageing: float | None = None
    indexed_arguments: tuple[str, ...] = ()
    hidden: tuple[str, ...] = (
        "password",
        "passwd",
        "passphrase",
        "secret",
        "token",
        "api_key",
        "apikey",
        "credential",
        "private_key",
    )
    embedded: bool = False
    name: str = ""
    silence_polling: bool = True
    middleware: tuple[str, ...] = ()
    # Not shown: webhooks have secrets.
    alerts: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    receivers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise InvalidOption(problem)

    @property
    def current_release(self) -> str:
        """The name of the release that this process runs; "" if it is not known."""
        return release.from_environment() if self.release is None else self.release

    @property
    def patience(self) -> float:
        """Seconds without a heartbeat, or without progress, before a process fences itself.

        2/3 of ``dead_after``: the process stops before other processes declare it dead.
        """
        return self.dead_after * 2 / 3

    @property
    def longest_shutdown(self) -> float:
        """Seconds that a process may take to end after a shutdown request.

        The bound holds in any state of its jobs and of the database.
        """
        return self.shutdown_timeout + 10.0

    @property
    def statement_limit(self) -> float:
        """Seconds that one of the queue's own statements may take."""
        return self.dead_after / 3

    @property
    def answer_limit(self) -> float:
        """Seconds that a group of related statements may take."""
        return self.dead_after / 2

    @classmethod
    def from_settings(cls, given: Mapping[str, object]) -> Options:
        """Return the options of a backend's ``OPTIONS``.

        Raises InvalidOption for an unknown key, naming the nearest one, and for an invalid value.
        """
        names = [field.name for field in fields(cls)]
        must_know(given, names)
        return cls().changed(**given)

    def changed(self, **changes: Any) -> Options:
        """Return these options with some of them changed."""
        for key in OF_NAMES & set(changes):
            changes[key] = as_names(changes[key])
        if not isinstance(allowed := changes.get("allow_import_errors", False), bool):
            changes["allow_import_errors"] = as_names(allowed)
        if isinstance(workers := changes.get("workers"), (list, tuple)):
            changes["workers"] = tuple(map(_with_names, workers))
        if isinstance(alerts := changes.get("alerts"), list):
            changes["alerts"] = tuple(alerts)
        if isinstance(receivers := changes.get("receivers"), Mapping):
            changes["receivers"] = {name: as_names(paths) for name, paths in receivers.items()}
        return replace(self, **changes)

    @property
    def alert_targets(self) -> list[AlertTarget]:
        """The entries of ``alerts``."""
        return [AlertTarget.from_settings(each) for each in self.alerts]

    def groups(self, changes: Mapping[str, object]) -> list[dict[str, object]]:
        """Return the changes of each group of workers to these options.

        ``changes`` are those of the command line. They apply to every group, and their ``queues``
        replace the groups by one.
        """
        groups = () if "queues" in changes else self.workers
        return [{**group, **changes} for group in groups or [{}]]

    def allows_import_error(self, module: str) -> bool:
        """Return True if runqueue serves without this module that holds tasks."""
        allowed = self.allow_import_errors
        return allowed if isinstance(allowed, bool) else module in allowed

    def check_queues(self, names: Collection[str]) -> None:
        """Raise InvalidOption for options of a queue that is not among these names.

        Without names, any queue is valid.
        """
        for queue in self.per_queue:
            if not isinstance(queue, str):
                raise InvalidOption(f"per_queue: {queue!r} is not a queue name. Give text.")
            if names and queue not in names:
                near = difflib.get_close_matches(queue, names, n=1)
                hint = (
                    f"Did you mean {near[0]!r}?"
                    if near
                    else f"Choose from {', '.join(sorted(names))}."
                )
                raise InvalidOption(f"per_queue: {queue!r} is not in QUEUES. {hint}")

    def of(self, queue: str) -> Options:
        """Return the options for the jobs of a queue."""
        own = self.per_queue.get(queue)
        return replace(self, per_queue={}, **own) if own else self


def _with_names(group: object) -> object:
    """Return a group of workers with its queues as a tuple."""
    if isinstance(group, Mapping) and "queues" in group:
        return {**group, "queues": as_names(group["queues"])}
    return group


def _problems(options: Any) -> Iterator[str]:
    yield from _whole(options, "max_attempts", least=1, most=MOST_ATTEMPTS)
    for name in ("processes", "threads"):
        yield from _whole(options, name, least=1, most=MOST_AT_A_TIME)
    yield from _whole(options, "coroutines", least=1)
    for name in ("prefetch", "prefetch_bytes", "keep_log"):
        yield from _whole(options, name, least=0)
    for name in ("max_jobs", "max_memory", "limit"):
        if getattr(options, name) is not None:
            yield from _whole(options, name, least=1)
    for each in fields(options):
        if each.type in ("float", "float | None") and (
            getattr(options, each.name) is not None or each.type == "float"
        ):
            yield from _seconds(options, each.name, is_optional=each.type != "float")
        if each.type == "bool" and not isinstance(getattr(options, each.name), bool):
            yield f"{each.name}={getattr(options, each.name)!r} is not True or False. Change it."
    if options.dead_after < 3 * options.beat_interval:
        yield (
            f"dead_after={options.dead_after!r} is under three times "
            f"beat_interval={options.beat_interval!r}: one late heartbeat would cost a healthy "
            "process its jobs. Raise dead_after."
        )
    yield from _names(options, "queues", "['default'] or 'default, mail'")
    if not options.queues:
        yield "queues is empty. Give ['default'], or '*' for all queues."
    yield from _names(options, "task_modules", "['shop.reports']")
    for name in options.task_modules if isinstance(options.task_modules, tuple) else ():
        if isinstance(name, str) and not _MODULE.fullmatch(name):
            yield f"task_modules: {name!r} is no module's path. Give such as 'shop.reports'."
    if not (options.database is None or (isinstance(options.database, str) and options.database)):
        yield (
            f"database={options.database!r} is not an alias in DATABASES. Give such as 'default', "
            "or None for the database of the project's routers."
        )
    if not isinstance(options.allow_import_errors, bool):
        yield from _names(options, "allow_import_errors", "['shop.tasks'], or True for all")
    yield from _names(options, "allow_sql", "['default']")
    yield from _names(options, "allow_commands", "['clearsessions']")
    yield from _names(options, "indexed_arguments", "['customer']")
    for name in options.indexed_arguments:
        if not (isinstance(name, str) and name.isidentifier()):
            yield (
                f"indexed_arguments: {name!r} is not the name of an argument. "
                "Give such as 'customer'."
            )
    yield from _names(options, "middleware", "['shop.tenants.TenantMiddleware']")
    for path in options.middleware:
        if not is_path(path):
            yield f"middleware: {path!r} is no dotted path. Give such as 'shop.tenants.Tenant'."
    yield from _names(options, "hidden", "['password', 'token']")
    if not callable(options.backoff):
        yield (
            f"backoff={options.backoff!r} is not callable. Give a strategy such as "
            "Exponential(first=5)."
        )
    if options.enqueue not in ENQUEUE:
        yield f"enqueue={options.enqueue!r} is not {' or '.join(map(repr, ENQUEUE))}. Change it."
    must_know(options.recurring, options.recurring, "recurring=")
    for name, own in options.recurring.items():
        yield from _problems_of_a_schedule(name, own)
    if not (isinstance(options.name, str) and _NAME.fullmatch(options.name)):
        yield (
            f"name={options.name!r} is not a name. Give up to 50 letters, digits, dots, hyphens "
            "and underscores."
        )
    if options.release is not None and not (
        isinstance(options.release, str)
        and options.release.isprintable()
        and len(options.release) <= release.LONGEST
    ):
        yield (
            f"release={options.release!r} is not one line of up to {release.LONGEST} characters. "
            "Give such as '2026.11.3', or None to take it from the environment."
        )
    must_know(options.receivers, SIGNALS, "receivers: ", "a signal of django_dbqueue.signals")
    for signal, paths in options.receivers.items():
        if not (isinstance(paths, tuple) and paths and all(map(is_path, paths))):
            yield (
                f"receivers: {signal!r} has {paths!r}, which is not a dotted path. Give such as "
                f"'shop.monitoring.{signal}', or a list of such paths."
            )
    yield from problems_of_alerts(options.alerts)
    # From here on, with all other options, which must be valid by now.
    must_know(options.per_queue, options.per_queue, "per_queue=")
    for queue, own in options.per_queue.items():
        where = f"per_queue[{queue!r}]: "
        must_know(own, OF_A_QUEUE, where)
        yield from (where + problem for problem in _problems_with(options, own))
    if not isinstance(options.workers, tuple):
        yield (
            f"workers={options.workers!r} is not a list of dicts. Give "
            "[{'queues': 'mail*', 'threads': 5}, {'queues': '*'}]."
        )
        return
    for place, group in enumerate(options.workers):
        where = f"workers[{place}]: "
        must_know(group, OF_A_GROUP, where)
        yield from (where + problem for problem in _problems_with(options, group))


def _problems_of_a_schedule(name: str, own: Mapping[str, Any]) -> Iterator[str]:
    where = f"recurring[{name!r}]: "
    must_know(own, OF_A_SCHEDULE, where)
    for key in TEXTS_OF_A_SCHEDULE:
        if not isinstance(own.get(key, ""), str):
            yield f"{where}{key}={own[key]!r} is not text. Change it."
    for key in FLAGS_OF_A_SCHEDULE:
        if not isinstance(own.get(key, False), bool):
            yield f"{where}{key}={own[key]!r} is not True or False. Change it."
    try:
        Recurrence.from_settings(name, own)
    except InvalidSchedule as error:
        yield f"recurring: {error}"


def _problems_with(options: Options, own: Mapping[str, Any]) -> Iterator[str]:
    try:
        replace(options, per_queue={}, workers=(), **own)
    except InvalidOption as error:
        yield str(error)


def _names(options: Options, name: str, such_as: str) -> Iterator[str]:
    value = getattr(options, name)
    if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
        yield f"{name}={value!r} is not a list of names. Give {such_as}."


def _whole(options: Options, name: str, *, least: int, most: int = MOST_WHOLE) -> Iterator[str]:
    value = getattr(options, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        yield f"{name}={value!r} is not a whole number of at least {least}. Change it."
    elif value > most:
        yield f"{name}={value!r} is over {most}. Lower it."


def _seconds(options: Options, name: str, *, is_optional: bool) -> Iterator[str]:
    value = getattr(options, name)
    if isinstance(value, timedelta):
        yield f"{name}={value!r} is not a number of seconds. Give {value.total_seconds():g}."
    elif not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        yield f"{name}={value!r} is not a number of seconds above 0. Change it."
    elif value < INSTANT:
        yield f"{name}={value!r} is under a microsecond. Raise it."
    elif value >= FOREVER:
        hint = "Give None for no bound" if is_optional else "Lower it"
        yield f"{name}={value!r} is over {FOREVER:,} seconds, 31 years. {hint}."
