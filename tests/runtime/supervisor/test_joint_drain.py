from __future__ import annotations

from django_dbqueue.runtime.supervisor.drain import JointDrain


class Backend:
    """A backend of a JointDrain, as its supervisor sees it."""

    def __init__(self, drains, name):
        self._drains, self._name = drains, name
        self.jobs = self.claimed = 0

    def enqueue(self):
        self.jobs += 1

    def run(self):
        self.claimed += 1
        self.jobs -= 1

    def check(self, meanwhile=lambda: None):
        def is_drained():
            drained = not self.jobs
            meanwhile()
            return drained

        return self._drains.is_over(self._name, is_drained, lambda: {"worker": self.claimed})


def backends(*names):
    drains = JointDrain(names)
    return [Backend(drains, name) for name in names]


def test_drain_of_one_backend_ends_at_once():
    (one,) = backends("default")
    one.enqueue()

    assert not one.check()
    one.run()
    assert one.check()


def test_drains_wait_for_each_other():
    default, bulk = backends("default", "bulk")

    for _ in range(5):
        assert not default.check()
    for _ in range(5):
        assert not bulk.check()

    assert default.check()
    assert bulk.check()


def test_job_seen_in_one_backend_makes_all_check_again():
    default, bulk = backends("default", "bulk")
    for each in (default, bulk, default):
        assert not each.check()
    bulk.enqueue()
    assert not bulk.check()
    bulk.run()

    for each in (default, default, bulk, bulk):
        assert not each.check()
    assert default.check()


def test_job_that_moves_between_all_checks_is_not_missed():
    default, bulk = backends("default", "bulk")
    bulk.enqueue()

    for _ in range(10):
        assert not default.check()
        default.enqueue()
        bulk.run()
        assert not bulk.check()
        bulk.enqueue()
        default.run()

    bulk.run()
    for each in (default, bulk, default):
        assert not each.check()
    assert bulk.check()


def test_job_that_ends_during_a_check_is_not_missed():
    default, bulk = backends("default", "bulk")

    def come_and_go():
        default.enqueue()
        default.run()

    for _ in range(5):
        assert not bulk.check()
        assert not default.check(come_and_go)


def test_drains_that_are_over_stay_over():
    (one,) = backends("default")
    one.check()
    one.enqueue()

    assert one.check()
