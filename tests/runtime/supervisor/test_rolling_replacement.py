"""Rolling replacement, with children that are no processes."""

from __future__ import annotations

from typing import Any

from django_dbqueue.core.options import Options
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.runtime.supervisor.child_spec import ChildSpec, specs
from django_dbqueue.runtime.supervisor.rolling_replacement import RollingReplacement

BOTH = ["worker", "dispatcher"]


class Child:
    exitcode: int | None = None
    is_outdated = False
    pid = 1

    def __init__(self, spec: ChildSpec) -> None:
        self.spec, self.role, self.status = spec, spec.role, SharedStatus.private()


class Supervisor:
    """The children of a supervisor. New ones are ready at once, unless ``slow``."""

    def __init__(self, *, slow: bool = False, **options: Any) -> None:
        self.slow, self.children, self.retired, self.refused = slow, [], [], 0
        self.fewest = self.most = 0
        self.wanted = specs(Options.from_settings(options), BOTH, {})
        self.delayed: list[tuple[str, ...]] = []
        self._replacement: Any = RollingReplacement(self.start, self.retire, self.may_start)

    def may_start(self, spec: ChildSpec) -> bool:
        return spec.options.queues not in self.delayed

    def start(self, spec: ChildSpec) -> Child | None:
        if self.refused:
            self.refused -= 1
            return None
        self.children.append(child := Child(spec))
        if not self.slow:
            child.status.mark_ready()
        return child

    def retire(self, child: Child) -> None:
        self.children.remove(child)
        self.retired.append(child)

    def turn(self, number: int = 1) -> None:
        for _ in range(number):
            self._replacement.proceed(self.wanted, self.children)
            ready = [each for each in self.children if each.status.is_ready]
            self.fewest = min(self.fewest or len(ready), len(ready))
            self.most = max(self.most, len(self.children))

    def reload(self, **options: Any) -> list[Child]:
        self.wanted = specs(Options.from_settings(options), BOTH, {})
        for child in self.children:
            child.is_outdated = True
        self.fewest = self.most = len(self.children)
        return list(self.children)

    @property
    def roles(self) -> list[str]:
        return sorted(child.role for child in self.children)


def test_missing_children_are_started_together():
    supervisor = Supervisor(slow=True, processes=3)

    supervisor.turn()

    assert supervisor.roles == ["dispatcher", "worker", "worker", "worker"]


def test_embedded_group_is_one_worker():
    supervisor = Supervisor(embedded=True, workers=[{"processes": 3}, {"queues": "mail"}])

    supervisor.turn()

    assert supervisor.roles == ["dispatcher", "worker", "worker"]


def test_outdated_children_are_replaced_one_by_one_by_ready_ones():
    supervisor = Supervisor(processes=3)
    supervisor.turn()
    old = supervisor.reload(processes=3)

    supervisor.turn(8)

    assert supervisor.retired == old
    assert supervisor.roles == ["dispatcher", "worker", "worker", "worker"]
    assert (supervisor.fewest, supervisor.most) == (4, 5)
    supervisor.turn(3)
    assert len(supervisor.retired) == 4


def test_outdated_child_stays_until_its_successor_is_ready():
    supervisor = Supervisor(processes=1)
    supervisor.turn()
    old = supervisor.reload(processes=1)
    supervisor.slow = True

    supervisor.turn(5)
    assert set(old) < set(supervisor.children)
    assert len(supervisor.children) == 3

    supervisor.children[-1].status.mark_ready()
    supervisor.turn()
    assert supervisor.retired == old[:1]


def test_outdated_child_stays_while_successors_die_at_their_start():
    supervisor = Supervisor(processes=1)
    supervisor.turn()
    old = supervisor.reload(processes=1)
    supervisor.slow = True

    for _ in range(4):
        supervisor.turn()
        supervisor.children[-1].exitcode = 1
        # Its end is seen here before the supervisor has removed it.
        supervisor.turn()
        supervisor.children.pop()
        assert supervisor.children == old

    supervisor.slow = False
    supervisor.turn(6)
    assert supervisor.retired == old


def test_outdated_child_stays_while_no_successor_can_be_started():
    supervisor = Supervisor(processes=1)
    supervisor.turn()
    old = supervisor.reload(processes=1)
    supervisor.refused = 3

    supervisor.turn(3)
    assert supervisor.children == old

    supervisor.turn(6)
    assert supervisor.retired == old


def test_outdated_child_that_dies_is_replaced_without_delay():
    supervisor = Supervisor(processes=2)
    supervisor.turn()
    supervisor.reload(processes=2)
    supervisor.slow = True
    supervisor.turn()

    supervisor.children.pop(0)
    successor = supervisor.children[-1]
    successor.status.mark_ready()
    supervisor.turn()

    assert supervisor.roles.count("worker") == 2 + 1


def test_reload_with_more_and_fewer_processes_changes_their_number():
    supervisor = Supervisor(processes=1)
    supervisor.turn()
    supervisor.reload(processes=3)
    supervisor.turn()
    assert supervisor.roles.count("worker") >= 3
    supervisor.turn(10)
    assert supervisor.roles == ["dispatcher", "worker", "worker", "worker"]

    supervisor.reload(workers=[{"queues": "mail"}])
    supervisor.turn(10)

    assert supervisor.roles == ["dispatcher", "worker"]
    assert supervisor.children[0].spec.options.queues == ("mail",) or (
        supervisor.children[1].spec.options.queues == ("mail",)
    )


def test_reload_during_a_reload_replaces_the_new_children_too():
    supervisor = Supervisor(processes=2)
    supervisor.turn()
    supervisor.reload(threads=2, processes=2)
    supervisor.turn(2)
    supervisor.reload(threads=3, processes=2)

    supervisor.turn(12)

    assert {each.spec.options.threads for each in supervisor.children} == {3}
    assert supervisor.roles == ["dispatcher", "worker", "worker"]


TWO_GROUPS = [{"queues": "a"}, {"queues": "b"}]


def test_missing_child_that_may_not_start_yet_delays_no_other():
    supervisor = Supervisor(workers=TWO_GROUPS)
    supervisor.delayed = [("a",)]

    supervisor.turn()
    assert supervisor.roles == ["dispatcher", "worker"]

    supervisor.delayed = []
    supervisor.turn()
    assert supervisor.roles == ["dispatcher", "worker", "worker"]


def test_outdated_child_stays_while_its_successor_may_not_start_and_delays_no_other():
    supervisor = Supervisor(workers=TWO_GROUPS)
    supervisor.turn()
    first, *others = supervisor.reload(threads=3, workers=TWO_GROUPS)
    supervisor.delayed = [("a",)]

    supervisor.turn(10)
    assert [each for each in supervisor.children if each.is_outdated] in ([first], others[:1])
    assert supervisor.roles == ["dispatcher", "worker", "worker"]

    supervisor.delayed = []
    supervisor.turn(4)
    assert not any(each.is_outdated for each in supervisor.children)
    assert supervisor.roles == ["dispatcher", "worker", "worker"]
