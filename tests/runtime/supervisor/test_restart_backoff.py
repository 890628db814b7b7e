"""The delay before a child that has crashed is started again."""

from __future__ import annotations

import pytest

from django_dbqueue.core.options import Options
from django_dbqueue.runtime.supervisor import restart_backoff
from django_dbqueue.runtime.supervisor.child_spec import specs
from django_dbqueue.runtime.supervisor.restart_backoff import RestartBackoff


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    monkeypatch.setattr(restart_backoff, "time", clock := Clock())
    return clock


MAIL, OTHER, DISPATCHER = specs(
    Options.from_settings({"workers": [{"queues": "mail"}, {"queues": "*"}]}),
    ["worker", "dispatcher"],
    {},
)


def test_delay_doubles_with_each_crash_in_a_row_up_to_its_longest(clock):
    backoff, delays = RestartBackoff(), []
    for number in range(1, 12):
        assert backoff.record(MAIL, born=clock.now) == number
        began = clock.now
        while not backoff.may_start(MAIL):
            clock.now += 0.1
        delays.append(round(clock.now - began, 1))

    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]
    assert 30 <= delays[-1] == delays[-2] < 30.2


def test_crash_of_a_child_that_lived_for_long_begins_a_new_row(clock):
    backoff = RestartBackoff()
    for _ in range(8):
        backoff.record(MAIL, born=clock.now)

    assert backoff.record(MAIL, born=clock.now - 11) == 1
    clock.now += 0.2
    assert backoff.may_start(MAIL)


def test_crash_delays_children_of_the_same_specification_only(clock):
    backoff = RestartBackoff()
    backoff.record(MAIL, born=clock.now)

    assert not backoff.may_start(MAIL)
    assert backoff.may_start(OTHER) and backoff.may_start(DISPATCHER)
    assert backoff.record(DISPATCHER, born=clock.now) == 1
    assert backoff.is_waiting
    clock.now += 31
    assert not backoff.is_waiting


def test_delay_outlasts_a_reload_that_leaves_the_group_as_it_is(clock):
    backoff = RestartBackoff()
    backoff.record(MAIL, born=clock.now)
    groups = [{"queues": "mail"}, {"queues": "*"}]
    again, *_ = specs(Options.from_settings({"workers": groups, "threads": 9}), ["worker"], {})

    assert not backoff.may_start(again)
