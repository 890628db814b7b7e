"""A dispatcher declares processes dead only after it has observed the database without a gap."""

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


def observe(failure_detector, clock, seconds):
    for _ in range(seconds):
        clock.pass_(1)
        failure_detector.observe(clock.database)


def test_detector_can_declare_dead_after_full_observation(clock):
    failure_detector = FailureDetector(20, 10)
    assert not failure_detector.can_declare_dead
    observe(failure_detector, clock, 19)
    assert not failure_detector.can_declare_dead
    observe(failure_detector, clock, 2)
    assert failure_detector.can_declare_dead


def test_outage_restarts_observation(clock):
    failure_detector = FailureDetector(20, 10)
    observe(failure_detector, clock, 30)
    clock.pass_(11)
    failure_detector.observe(clock.database)
    assert not failure_detector.can_declare_dead
    observe(failure_detector, clock, 21)
    assert failure_detector.can_declare_dead


@pytest.mark.parametrize("step", [-3600, 3600, 12])
def test_step_of_database_clock_restarts_observation(clock, step):
    failure_detector = FailureDetector(20, 10)
    observe(failure_detector, clock, 30)
    clock.database += timedelta(seconds=step)
    observe(failure_detector, clock, 1)
    assert not failure_detector.can_declare_dead
    observe(failure_detector, clock, 21)
    assert failure_detector.can_declare_dead


def test_suspended_detector_restarts_observation(clock):
    """The monotonic clock may stand still during a suspension."""
    failure_detector = FailureDetector(20, 10)
    observe(failure_detector, clock, 30)
    clock.database += timedelta(seconds=300)
    failure_detector.observe(clock.database)
    assert not failure_detector.can_declare_dead


def test_short_outage_does_not_restart_observation(clock):
    """The gap is shorter than the tolerance of 10 seconds."""
    failure_detector = FailureDetector(20, 10)
    observe(failure_detector, clock, 30)
    clock.pass_(8)
    failure_detector.observe(clock.database)
    assert failure_detector.can_declare_dead
