"""A dispatcher judges others only if it has watched without a gap."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from django_dbqueue.runtime import failure_detector as module
from django_dbqueue.runtime.failure_detector import FailureDetector


class Clock:
    def __init__(self):
        self.now, self.database = 100.0, timezone.now()

    def monotonic(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds
        self.database += timedelta(seconds=seconds)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def watch(witness, clock, seconds):
    for _ in range(seconds):
        clock.pass_(1)
        witness.look(clock.database)


def test_who_has_watched_long_enough_may_judge(clock):
    witness = FailureDetector(20, 10)
    assert not witness.can_declare_dead
    watch(witness, clock, 19)
    assert not witness.can_declare_dead
    watch(witness, clock, 2)
    assert witness.can_declare_dead


def test_after_an_outage_it_watches_anew(clock):
    witness = FailureDetector(20, 10)
    watch(witness, clock, 30)
    clock.pass_(11)
    witness.look(clock.database)
    assert not witness.can_declare_dead
    watch(witness, clock, 21)
    assert witness.can_declare_dead


@pytest.mark.parametrize("step", [-3600, 3600, 12])
def test_after_a_step_of_the_databases_clock_it_watches_anew(clock, step):
    witness = FailureDetector(20, 10)
    watch(witness, clock, 30)
    clock.database += timedelta(seconds=step)
    watch(witness, clock, 1)
    assert not witness.can_declare_dead
    watch(witness, clock, 21)
    assert witness.can_declare_dead


def test_who_was_suspended_itself_watches_anew(clock):
    """Its monotonic clock may have stood still meanwhile."""
    witness = FailureDetector(20, 10)
    watch(witness, clock, 30)
    clock.database += timedelta(seconds=300)
    witness.look(clock.database)
    assert not witness.can_declare_dead


def test_a_moment_without_the_database_does_not_matter(clock):
    """No process that lives is silent for so short a time."""
    witness = FailureDetector(20, 10)
    watch(witness, clock, 30)
    clock.pass_(8)
    witness.look(clock.database)
    assert witness.can_declare_dead
