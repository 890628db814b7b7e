"""What operators ask of processes, and when a process learns it."""

from __future__ import annotations

import pytest
from django.db import connection

from django_dbqueue.models import Process

from ..conftest import a_process

pytestmark = pytest.mark.django_db
Kind = Process.Kind


def ask(process, before=""):
    return Process.objects.request_of(process, before)


def beat_and_ask(process, before=""):
    return Process.objects.beat_and_ask(process, 30, None, before)


@pytest.mark.parametrize("request_of", [ask, beat_and_ask])
def test_request_of_a_supervisor_holds_for_each_of_its_workers(request_of):
    supervisor = a_process("supervisor", kind=Kind.SUPERVISOR)
    worker = a_process("worker", supervisor=supervisor)

    assert (request_of(worker), request_of(supervisor)) == ("", "")
    Process.objects.filter(pk=supervisor.pk).quiet()
    assert (request_of(worker), request_of(supervisor)) == ("quiet", "quiet")
    assert not Process.objects.workers().get().serves("mail")
    Process.objects.filter(pk=worker.pk).stop()
    assert request_of(worker) == "stop"
    Process.objects.filter(pk=supervisor.pk).resume()
    assert (request_of(worker), request_of(supervisor)) == ("stop", "")
    Process.objects.filter(kind=Kind.SUPERVISOR).delete()
    assert request_of(worker) == "stop"


@pytest.mark.parametrize("request_of", [ask, beat_and_ask])
def test_request_holds_while_the_row_of_the_supervisor_is_missing(request_of):
    supervisor = a_process("supervisor", kind=Kind.SUPERVISOR)
    worker = a_process("worker", supervisor=supervisor)

    assert request_of(worker, before="quiet") == ""
    Process.objects.filter(pk=supervisor.pk).delete()
    assert request_of(worker, before="quiet") == "quiet"
    assert request_of(worker) == ""


def test_request_holds_while_the_own_row_is_missing():
    supervisor = a_process("supervisor", kind=Kind.SUPERVISOR)
    Process.objects.filter(pk=supervisor.pk).delete()

    assert ask(supervisor, before="quiet") == "quiet"


def test_process_learns_with_a_heartbeat_that_it_was_declared_dead():
    supervisor = a_process("supervisor", kind=Kind.SUPERVISOR)
    worker = a_process("worker", supervisor=supervisor)
    other = a_process("other")
    Process.objects.filter(pk=worker.pk).delete()

    assert beat_and_ask(worker, before="quiet") is None
    assert beat_and_ask(other) == ""


def test_heartbeat_writes_its_own_row_only():
    supervisor = a_process("supervisor", kind=Kind.SUPERVISOR)
    worker = a_process("worker", supervisor=supervisor)
    before = Process.objects.get(pk=supervisor.pk).expires_at

    assert Process.objects.beat_and_ask(worker, 7200, 5_000_000) == ""

    beaten = Process.objects.get(pk=worker.pk)
    assert (beaten.memory, beaten.expires_at > worker.expires_at) == (5_000_000, True)
    assert Process.objects.get(pk=supervisor.pk).expires_at == before


def test_heartbeat_that_also_asks_is_one_statement_on_postgresql(django_assert_num_queries):
    worker = a_process("worker", supervisor=a_process("supervisor", kind=Kind.SUPERVISOR))

    with django_assert_num_queries(1 if connection.vendor == "postgresql" else 2):
        beat_and_ask(worker)
