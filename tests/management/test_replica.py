"""Each verb of the command line, with a router that reads from a replica.

The queue's rows are only in the primary, and no statement may reach the other database.
"""

from __future__ import annotations

import io
import re
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_dbqueue import batch, task
from django_dbqueue.core.alert_targets import AlertTarget
from django_dbqueue.doctor.finding import Finding
from django_dbqueue.engine import alerts
from django_dbqueue.management.commands.queue import Command
from django_dbqueue.models import Job, Process, Queue, RecurringTask, TaskState
from django_dbqueue.testing import drain

from .. import tasks
from ..conftest import a_process, with_options

pytestmark = pytest.mark.django_db(databases=["default", "other"])
TARGET = AlertTarget(way="function", to=("tests.test_alerts.told",))


@task(takes_context=True)
def half_done(context: Any) -> None:
    context.progress(1, 2)
    raise ValueError("unknown")


@pytest.fixture
def ids(settings: Any) -> dict[str, str]:
    """Create rows of each kind, and return the ids of jobs by their state."""
    half_done.enqueue()
    tasks.add.enqueue(1)
    drain()
    with batch():
        ready = tasks.add.using(metadata={"order": 17}).enqueue(3)
    tasks.add.using(run_after=timedelta(hours=1)).enqueue(2)
    running, blocked = tasks.one_at_a_time.enqueue_many([(), ()])
    supervisor = a_process("supervisor@here:1:abc", kind="supervisor")
    process = a_process("worker@here:1:abc", details={"queues": "*"}, supervisor=supervisor)
    now = timezone.now()
    Job.objects.filter(pk=running.id).update(
        state="running", process=process, attempt=1, started_at=now
    )
    Job.objects.filter(pk=blocked.id).update(state="blocked", blocked_by="tests.tasks")
    Queue.objects.named("mail").pause()
    TaskState.objects.named("tests.tasks.add").pause()
    RecurringTask.objects.create(name="nightly", task="tests.tasks.nothing", cron="30 2 * * *")
    alerts.note("default", TARGET, {("workers", ""): Finding("what", "why", "remedy")})
    found = {state: str(pk) for state, pk in Job.objects.values_list("state", "pk")}
    assert found.keys() == {*("failed", "successful", "scheduled", "ready", "running", "blocked")}
    assert found["ready"] == ready.id
    settings.DATABASE_ROUTERS = ["tests.routers.ReplicaRouter"]
    return found


def call(*words: str) -> str:
    """Call a command; return its output. No statement may reach the replica."""
    out = io.StringIO()
    options = {"alerts": [{"function": "tests.test_alerts.told"}]}
    with CaptureQueriesContext(connections["other"]) as seen, with_options(**options):
        try:
            call_command(*words, stdout=out, stderr=out)
        except SystemExit as exit:
            assert words[0] != "queue" or words[1] == "check", (exit.code, out.getvalue())
    assert not seen.captured_queries
    return out.getvalue()


# Words of each verb, and what is in the output if it is read from the primary.
VERBS = [
    ("stats", r"paused queues +1"),
    ("queues", r"mail"),
    ("workers", r"worker@here"),
    ("recurring", r"nightly"),
    ("jobs", r"half_done"),
    ("jobs --state failed --task tests.management.test_replica.half_done", r"half_done"),
    ("failures", r"unknown"),
    ("failures --all", r"unknown"),
    ("alerts", r"workers"),
    ("alerts --test", r"function tests"),
    ("enqueue tests.tasks.add --args [1]", r"-"),
    ("enqueue tests.tasks.index_document --args [1]", r"-"),
    ("enqueue tests.tasks.one_at_a_time", r"-"),
    ("retry {failed}", r"changed 1 job"),
    ("retry --all --dry-run", r"would change 1 job"),
    ("discard --all", r"changed 4 jobs"),
    ("stop {running}", r"changed 1 job"),
    ("run-now --state scheduled", r"changed 1 job"),
    ("pause default", r"changed 1 of 1"),
    ("pause tests.tasks.fail --task --for 60", r"changed 1 of 1"),
    ("resume mail", r"changed 1 of 1"),
    ("resume tests.tasks.add --task", r"changed 1 of 1"),
    ("run {successful}", r"returned"),
    ("check --pending", r"can run all jobs"),
    ("top --once", r"one_at_a_time"),
    *[
        (f"show {{{state}}}", state)
        for state in ("failed", "successful", "scheduled", "ready", "blocked")
    ],
    ("show {running}", r"worker@here"),
]
# They are of two databases.
OTHERS = {"move", "import"}


def test_each_verb_is_called() -> None:
    parser = Command().create_parser("manage.py", "queue")
    (verbs,) = (each.choices for each in parser._actions if each.dest == "action")

    assert {words.partition(" ")[0] for words, _ in VERBS} | OTHERS == set(verbs)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("words", "said"), VERBS)
def test_verb_reads_from_the_primary(
    ids: dict[str, str], words: str, said: str, as_json: bool
) -> None:
    out = call("queue", *words.format(**ids).split(), *["--json"] * as_json)

    assert as_json or re.search(said, out), out


@pytest.mark.parametrize("command", ["checkqueue", "queuehealth"])
@pytest.mark.parametrize("as_json", [False, True])
def test_check_reads_from_the_primary(ids: dict[str, str], command: str, as_json: bool) -> None:
    Process.objects.all().delete()

    assert "No runqueue is alive" in call(command, *["--json"] * as_json)
