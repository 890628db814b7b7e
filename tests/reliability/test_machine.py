"""A machine that does to the queue whatever can be done to it, in any order and two things at a time.

After each step it compares the rows with what the actors were told: who got which attempt of which job, and whose outcome of
it was accepted.
"""

from __future__ import annotations

import os

import pytest
from django.db.models.signals import post_delete, post_save, pre_delete, pre_save
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from .machine_batches import Walks
from .machine_liveness import Liveness


class Machine(Liveness, Walks):
    """All of it: a job of a key may be limited, walk, and belong to a batch."""


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(600)
def test_whatever_is_done_in_whatever_order(settings_of_the_machine, receivers):
    run_state_machine_as_test(Machine, settings=settings_of_the_machine)


@pytest.fixture
def settings_of_the_machine():
    examples = int(os.environ.get("DBQUEUE_EXAMPLES", 30))
    return settings(
        max_examples=examples,
        stateful_step_count=24,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],  # To shrink what failed would take the database many minutes.
    )


@pytest.fixture
def receivers():
    """Of a project, without a sender: they see all models, and none of the queue's statements goes through them."""

    def receive(sender, **kwargs):
        assert sender._meta.app_label != "dbqueue", f"a signal was sent for {sender}"

    signals = pre_save, post_save, pre_delete, post_delete
    for signal in signals:
        signal.connect(receive)
    yield
    for signal in signals:
        signal.disconnect(receive)
