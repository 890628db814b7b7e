"""A state machine that runs random operations on the queue, two at a time.

After each step it compares the rows with the results that the actors received: the owner of
each attempt, and the accepted results.
"""

from __future__ import annotations

import os

import pytest
from django.db.models.signals import post_delete, post_save, pre_delete, pre_save
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from .machine_batches import Pipelines
from .machine_liveness import Liveness


class Machine(Liveness, Pipelines):
    """The whole machine: a keyed job may have a limit, a pipeline and a batch."""


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(600)
def test_random_operations_keep_invariants(machine_settings, receivers):
    run_state_machine_as_test(Machine, settings=machine_settings)


@pytest.fixture
def machine_settings():
    examples = int(os.environ.get("DBQUEUE_EXAMPLES", 30))
    return settings(
        max_examples=examples,
        stateful_step_count=24,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],  # Shrinking a failure would take the database many minutes.
    )


@pytest.fixture
def receivers():
    """Connect receivers for all models: no statement of the queue sends a signal."""

    def receive(sender, **kwargs):
        assert sender._meta.app_label != "dbqueue", f"a signal was sent for {sender}"

    signals = pre_save, post_save, pre_delete, post_delete
    for signal in signals:
        signal.connect(receive)
    yield
    for signal in signals:
        signal.disconnect(receive)
