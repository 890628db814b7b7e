"""Fixtures for the suite, which runs on every database."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connection, connections
from django.test import TransactionTestCase, override_settings

from django_dbqueue.compat import task_backends
from django_dbqueue.contrib import tasks as ready_made_tasks  # noqa: F401 - By the settings of the suite.
from django_dbqueue.models import Job, Process
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.runtime.shutdown import Shutdown
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.worker import Worker

from . import direct
from .flush import flush
from .process_starter import CAN_FORK, Starter

BOTH = ["default", "other"]
# Seconds until a test gives up waiting: a busy machine may take ten times as long as an idle one.
LONG = 120.0


# Tests that take half a minute and more. Each process begins with its share of them, so that none
# works on one while the others have nothing left to do.
LONG_TESTS = (
    "test_pages_cost_no_more_with_a_million_jobs",
    "test_random_operations_keep_invariants",
    "test_jobs_of_disconnected_host_run_on_another_within_35_seconds",
    "test_limit_holds_while_workers_are_killed",
    "test_worker_processes_are_replaced_by_age_without_losing_a_job",
    "test_receiver_that_hangs_is_logged_and_delays_neither_jobs_nor_heartbeats_for_long",
    "test_disconnected_worker_loses_its_jobs_and_late_results",
    "test_queue_moves_while_both_sides_work_and_movers_are_killed",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if getattr(item, "originalname", "") in LONG_TESTS]
    long.sort(key=lambda item: LONG_TESTS.index(getattr(item, "originalname", "")))
    others = [item for item in items if item not in long]
    items.clear()
    # The parts that "--dist worksteal" gives to the processes at first.
    for number in range(processes):
        size = (len(long) + len(others)) // (processes - number)
        mine, long = (
            long[:: processes - number],
            [item for place, item in enumerate(long) if place % (processes - number)],
        )
        items += [*mine, *others[: size - len(mine)]]
        others = others[size - len(mine) :]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    """Replace text in a test's log that cannot be sent between test processes."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session", autouse=True)
def quick_flush() -> None:
    def empty(test: Any) -> None:
        for database in test._databases_names(include_mirrors=False):
            flush(database)

    TransactionTestCase._fixture_teardown = empty  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None) -> Iterator[None]:
    """Close this thread's connections before the databases are dropped.

    Django closes those with which it made them. A test in which the queue discards a connection
    leaves another one.
    """
    yield
    connections.close_all()


@pytest.fixture(autouse=True)
def forget_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the test's declarations of recurring tasks."""
    monkeypatch.setattr(sys.modules["django_dbqueue.recurrence.declare"], "_by_name", {})


@pytest.fixture
def backend() -> Any:
    return task_backends["default"]


@pytest.fixture
def process(db: Any) -> Process:
    """A live worker process."""
    return a_process("worker@here:1:abc")


def a_process(name: str, **values: Any) -> Process:
    process = Process.objects.create(
        **{
            "name": name,
            "kind": "worker",
            "hostname": "here",
            "pid": 1,
            "expires_at": now_plus(3600),
            **values,
        }
    )
    process.refresh_from_db()
    return process


@pytest.fixture
def claim(process: Process) -> Callable[..., list[Job]]:
    """Claim all ready jobs, for this process or another."""

    def claim(owner: Process = process, limit: int = 100, group_size: int = 1) -> list[Job]:
        found = (
            direct.claim(lane, owner, limit, lambda job, line: group_size)
            for lane in Job.objects.lanes()
        )
        return list(itertools.chain.from_iterable(found))

    return claim


def all_claimed(claimer: Claimer, limit: int) -> list[Job]:
    """Return the jobs that the claimer claims, of all lanes."""
    return list(itertools.chain.from_iterable(claimer.claim(limit)))


def with_options(**options: Any) -> Any:
    """Return a context in which the default backend has these OPTIONS."""
    backend = {
        "BACKEND": "django_dbqueue.backend.DatabaseBackend",
        "QUEUES": [],
        "OPTIONS": {"database": "default", **options},
    }
    return override_settings(TASKS={"default": backend})


def is_mysql_itself() -> bool:
    """Return whether the tests run on MySQL, and not on MariaDB. It may ask the database."""
    return connection.vendor == "mysql" and not connection.mysql_is_mariadb


def skip_if_long_numbers_are_refused() -> None:
    """See test_mysql_refuses_numbers_that_python_cannot_read()."""
    if is_mysql_itself():
        pytest.skip("MySQL refuses JSON with such numbers.")


def until(condition: Callable[[], Any], seconds: float = LONG) -> Any:
    """Wait until the callable returns a true value, and return it; else fail the test."""
    end, pause = time.monotonic() + seconds, 0.02
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"The condition was not met within {seconds} s: {condition}")
        time.sleep(pause)
        pause = min(0.1, pause * 1.2)  # Four tests that wait must not keep the machine busy.
    return value


def is_found_within(task: Any, seconds: float) -> bool:
    """Return whether an idle worker claims a new job in time, in one of a few tries."""
    assert task.enqueue().wait(LONG)
    for _ in range(5):
        time.sleep(1.5)  # Until its poll interval is at its longest.
        result = task.enqueue()
        result.wait(LONG)
        if (result.started_at - result.enqueued_at).total_seconds() < seconds:
            return True
    return False


def most_at_a_time(intervals) -> int:
    """Return the maximum overlap of ended intervals. A killed attempt has no recorded end."""
    events = sorted([(i.began_at, 1) for i in intervals] + [(i.ended_at, -1) for i in intervals])
    running = most = 0
    for _time, change in events:
        running += change
        most = max(most, running)
    return most


@pytest.fixture(scope="session")
def starter() -> Iterator[Starter]:
    starter = Starter(environment_of_runqueue())
    yield starter
    starter.close()


@pytest.fixture
def runqueue(
    transactional_db: Any, tmp_path: Any, starter: Starter
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ``runqueue`` on the test's database, by a fork where possible. It ends with the test.

    ``fresh`` starts it as a user would. ``--reload`` starts such a process by itself. ``inside`` is
    the beginning of the command line.
    """
    started = []

    def start(
        *arguments: str,
        inside: Sequence[str] = (),
        cwd: Path = settings.BASE_DIR,
        fresh: bool = not CAN_FORK,
        **env: str,
    ) -> subprocess.Popen[str]:
        log = (tmp_path / f"runqueue-{len(started)}.log").open("w+")
        environment = {**environment_of_runqueue(), **env}
        if fresh or inside or cwd != settings.BASE_DIR or "--reload" in arguments:
            child: Any = subprocess.Popen(
                [*inside, sys.executable, "-W", "error", "-m", "django", "runqueue", *arguments],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=cwd,
                start_new_session=True,
            )
        else:
            child = starter.start(["runqueue", *arguments], environment, log)
        child.log = log
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(5)  # Without its database, it would wait for that.
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        child.log.seek(0)
        sys.stderr.write(child.log.read())
        child.log.close()


@pytest.fixture
def worker(backend: Any) -> Iterator[Callable[..., None]]:
    """Start a worker. It ends with the test."""
    stop = Shutdown()
    started = []

    def start(**options: Any) -> None:
        options = {"threads": 2, "poll_interval": 0.05} | options
        worker = Worker(backend, backend.config.changed(**options), SharedStatus.private(100))
        started.append(threading.Thread(target=worker.run, args=(stop,)))
        started[-1].start()

    yield start
    stop.request()
    for thread in started:
        thread.join(LONG)
        assert not thread.is_alive()
    connections.close_all()


def until_a_lock_is_awaited() -> None:
    """Wait until one side of a staged race waits for a lock of the other."""
    sql = {
        "postgresql": "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()",
        "mysql": "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
    }[connection.vendor]

    def waits() -> bool:
        time.sleep(0.12)  # MariaDB does not refresh this table when it is read more often.
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                # A transaction otherwise sees the activity of its first look.
                cursor.execute("SELECT pg_stat_clear_snapshot()")
            cursor.execute(sql)
            return cursor.fetchone() is not None

    until(waits)


def environment_of_runqueue() -> dict[str, str]:
    return {**os.environ, **address_of_the_test_database(), "DBQUEUE_WITHOUT_ADMIN": "1"}


def log_of(child: subprocess.Popen[str]) -> str:
    return Path(child.log.name).read_text()  # type: ignore[attr-defined]


def address_of_the_test_database() -> dict[str, str]:
    """Return the environment of a child that uses the test database under its present name."""
    return {
        "DBQUEUE_IN_TEST_DATABASE": "1",
        "DATABASE_URL": os.environ.get("DATABASE_URL", ""),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
    }
