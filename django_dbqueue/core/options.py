"""``TASKS[alias]["OPTIONS"]`` and the flags of ``runqueue``, as one frozen object.

The object is validated before any use.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..backoff import Backoff, Exponential
from ..exceptions import InvalidOption

# The largest value that the job's column holds on every database.
MOST_ATTEMPTS = 32767
DAY = 86_400.0
# Options that ``per_queue`` accepts.
OF_A_QUEUE = (
    *("max_attempts", "backoff", "timeout", "limit", "hanged_after", "ready_within"),
    *("keep_successful", "keep_failed", "delete_on_success", "keep_log"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for storing and running a backend's jobs. Times are in seconds.

    The task's own value takes precedence over max_attempts, backoff, timeout and delete_on_success.

    database: the alias of the database that holds the queue; None asks the project's database
        routers.
    max_attempts: the number of attempts before a job is FAILED.
    backoff: the delay between two attempts.
    timeout: the longest time that a job may run; None for no timeout.
    per_queue: other values for the jobs of some queues: ``{"mail": {"timeout": 30}}``.
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
    max_jobs: the number of jobs after which a worker process is replaced; None for never.
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
    delete_on_success: keep nothing of jobs that succeed.
    keep_log: the number of last lines logged by a task that are kept with its attempt.
    ageing: each time that a job has waited for this long, it counts as one priority higher; None
        for never.
    hidden: words; the admin does not show values whose name contains one of them.
    embedded: everything in one process, as threads.
    """

    database: str | None = None
    max_attempts: int = 1
    backoff: Backoff = Exponential()
    timeout: float | None = None
    per_queue: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
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
    max_jobs: int | None = None
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
    delete_on_success: bool = False
    keep_log: int = 0
    ageing: float | None = None
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

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise InvalidOption(problem)

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
        _must_know(given, names)
        return cls().changed(**given)

    def changed(self, **changes: Any) -> Options:
        """Return these options with some of them changed."""
        for key in {"queues", "task_modules", "hidden", "allow_sql", "allow_commands"} & set(
            changes
        ):
            changes[key] = _as_names(changes[key])
        if not isinstance(allowed := changes.get("allow_import_errors", False), bool):
            changes["allow_import_errors"] = _as_names(allowed)
        return replace(self, **changes)

    def allows_import_error(self, module: str) -> bool:
        """Return True if runqueue serves without this module that holds tasks."""
        allowed = self.allow_import_errors
        return allowed if isinstance(allowed, bool) else module in allowed

    def check_queues(self, names: Collection[str]) -> None:
        """Raise InvalidOption for options of a queue that is not among these names.

        Without names, any queue is valid.
        """
        for queue in self.per_queue:
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


def _must_know(given: object, names: Iterable[str], where: str = "") -> None:
    if not isinstance(given, Mapping):
        raise InvalidOption(f"{where}{given!r} is not a dict. Pass a dict, or remove it.")
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(str(key).lower(), names, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Choose from {', '.join(names)}."
            raise InvalidOption(f"{where}{key!r} is not an option. {hint}")


def _as_names(given: object) -> object:
    """Return names as a tuple, from a list or from text with commas."""
    if isinstance(given, str):
        given = [name.strip() for name in given.split(",") if name.strip()]
    return tuple(given) if isinstance(given, (list, tuple)) else given


def _problems(options: Any) -> Iterator[str]:
    for name in ("max_attempts", "processes", "threads", "coroutines"):
        yield from _whole(options, name, least=1)
    for name in ("prefetch", "prefetch_bytes", "keep_log"):
        yield from _whole(options, name, least=0)
    if isinstance(options.max_attempts, int) and options.max_attempts > MOST_ATTEMPTS:
        yield f"max_attempts={options.max_attempts!r} is over {MOST_ATTEMPTS}. Lower it."
    for name in ("max_jobs", "limit"):
        if getattr(options, name) is not None:
            yield from _whole(options, name, least=1)
    for each in fields(options):
        if each.type in ("float", "float | None") and (
            getattr(options, each.name) is not None or each.type == "float"
        ):
            yield from _seconds(options, each.name)
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
    if not isinstance(options.allow_import_errors, bool):
        yield from _names(options, "allow_import_errors", "['shop.tasks'], or True for all")
    yield from _names(options, "allow_sql", "['default']")
    yield from _names(options, "allow_commands", "['clearsessions']")
    yield from _names(options, "hidden", "['password', 'token']")
    if not callable(options.backoff):
        yield (
            f"backoff={options.backoff!r} is not callable. Give a strategy such as "
            "Exponential(first=5)."
        )
    _must_know(options.per_queue, options.per_queue, "per_queue=")
    for queue, own in options.per_queue.items():
        where = f"per_queue[{queue!r}]: "
        _must_know(own, OF_A_QUEUE, where)
        yield from (where + problem for problem in _problems_of_a_queue(options, queue))


def _problems_of_a_queue(options: Options, queue: str) -> Iterator[str]:
    try:
        options.of(queue)
    except InvalidOption as error:
        yield str(error)


def _names(options: Options, name: str, such_as: str) -> Iterator[str]:
    value = getattr(options, name)
    if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
        yield f"{name}={value!r} is not a list of names. Give {such_as}."


def _whole(options: Options, name: str, *, least: int) -> Iterator[str]:
    value = getattr(options, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        yield f"{name}={value!r} is not a whole number of at least {least}. Change it."


def _seconds(options: Options, name: str) -> Iterator[str]:
    value = getattr(options, name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 10**9:
        yield f"{name}={value!r} is not a number of seconds above 0. Change it."
