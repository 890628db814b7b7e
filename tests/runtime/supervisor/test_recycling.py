"""Which worker processes are to be replaced for their age or their memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from django_dbqueue.core.options import Options
from django_dbqueue.runtime import resident_memory
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.runtime.supervisor import recycling
from django_dbqueue.runtime.supervisor.child_spec import specs
from django_dbqueue.runtime.supervisor.children import ChildProcess
from django_dbqueue.runtime.supervisor.recycling import reason_to_recycle
from django_dbqueue.runtime.supervisor.supervisor import Supervisor


class Process(ChildProcess):
    """A child that is this process."""

    pid = os.getpid()

    def __init__(self, age: float, role: str = "worker", **options: object) -> None:
        (self.spec,) = specs(Options.from_settings(options), [role], {})
        self.role, self.born, self.jitter = role, time.monotonic() - age, 1.0


def test_process_without_limits_is_kept():
    assert reason_to_recycle(Process(10**6)) is None


@pytest.mark.parametrize(("age", "is_old"), [(50, False), (101, True)])
def test_process_is_recycled_by_age(age, is_old):
    reason = reason_to_recycle(Process(age, max_age=100))

    assert reason == ("is 101 s old (max_age=100)" if is_old else None)


@pytest.mark.parametrize(("used", "is_large"), [(500.0, False), (501.0, True), (None, False)])
def test_process_is_recycled_by_memory(monkeypatch, used, is_large):
    monkeypatch.setattr(recycling, "resident_mb", lambda pid: used)

    reason = reason_to_recycle(Process(100, max_memory=500))

    assert reason == ("uses 501 MB (max_memory=500)" if is_large else None)


def test_memory_limit_that_a_new_process_exceeds_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(recycling, "resident_mb", lambda pid: 90.0)

    reason = reason_to_recycle(Process(12, max_memory=50))

    assert reason == "uses 90 MB 12 s after its start: raise max_memory (max_memory=50)"


def test_process_that_has_just_started_is_kept(monkeypatch):
    monkeypatch.setattr(recycling, "resident_mb", lambda pid: 90.0)

    assert reason_to_recycle(Process(9, max_age=1, max_memory=1)) is None


def test_dispatcher_is_never_recycled():
    assert reason_to_recycle(Process(10**6, "dispatcher", max_age=1, max_memory=1)) is None


def test_memory_of_a_process_grows_with_what_it_holds():
    before = resident_memory.resident_mb(os.getpid())
    held = bytearray(b"x") * (100 * resident_memory.MB)

    after = resident_memory.resident_mb(os.getpid())

    assert before and after
    assert 80 < after - before < 300
    assert held


def test_memory_is_read_from_ps_without_proc(monkeypatch):
    own = resident_memory.resident_mb(os.getpid())
    monkeypatch.setattr(resident_memory, "PROC", Path("/no/such/folder"))
    answer = subprocess.CompletedProcess([], 0, stdout=" 2048\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: answer)

    assert resident_memory.resident_mb(os.getpid()) == 2.0
    assert own


@pytest.mark.parametrize("folder", ["/proc", "/no/such/folder"])
def test_memory_of_a_process_that_has_ended_is_unknown(monkeypatch, folder):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    monkeypatch.setattr(resident_memory, "PROC", Path(folder))
    monkeypatch.setenv("PATH", "")  # As on Windows, there may be no ps.

    assert resident_memory.resident_mb(child.pid) is None


@pytest.fixture
def supervisor(backend, monkeypatch):
    """A supervisor of two workers, all of which are too old from their start."""

    def start(self, spec):
        child = Process(10**6)
        child.spec, child.status = spec, SharedStatus.private()
        child.status.mark_ready()
        self._children.append(child)
        return child

    monkeypatch.setattr(Supervisor, "_start", start)
    monkeypatch.setattr(Process, "close", lambda self: None)
    return Supervisor(backend, ["worker"], {"processes": 2, "max_age": 1})


def turn(supervisor, number=10):
    for _ in range(number):
        supervisor._recycle_at = 0.0
        supervisor._recycle()
        supervisor._start_missing()


def test_one_more_process_for_each_runs_at_most_while_recycled_ones_have_jobs(supervisor):
    turn(supervisor)

    assert len(supervisor._leaving) == len(supervisor._children) == 2


def test_recycling_continues_once_a_recycled_process_has_ended(supervisor):
    turn(supervisor)
    first, second = supervisor._leaving

    supervisor._forget(first)
    turn(supervisor)

    assert len(supervisor._leaving) == len(supervisor._children) == 2
    assert second in supervisor._leaving
    assert first not in supervisor._leaving


def test_jobs_of_one_group_do_not_delay_recycling_of_another(backend, supervisor):
    groups = [{"queues": "mail"}, {"queues": "*"}]
    config = Options.from_settings({"workers": groups, "max_age": 1})
    supervisor._specs = mail, other = specs(config, ["worker"], {})
    turn(supervisor)
    supervisor._forget(next(each for each in supervisor._leaving if each.spec == other))
    kept = [each for each in supervisor._children if each.spec == mail]

    turn(supervisor)

    assert sorted(each.spec.options.queues for each in supervisor._leaving) == [("*",), ("mail",)]
    assert [each for each in supervisor._children if each.spec == mail] == kept
