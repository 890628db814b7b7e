"""Rolling replacement of outdated children: one by one, and each successor starts first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ...core.safe_log import logger
from .child_spec import ChildSpec, missing
from .children import Child


class RollingReplacement:
    """Replaces outdated children of a supervisor.

    start: starts a child; returns None if it cannot be started now.
    retire: lets a child end once its running jobs have ended.
    may_start: returns whether such a child may be started now; others are not delayed by it.
    """

    def __init__(
        self,
        start: Callable[[ChildSpec], Child | None],
        retire: Callable[[Child], None],
        may_start: Callable[[ChildSpec], bool],
    ) -> None:
        self._start, self._retire, self._may_start = start, retire, may_start
        # The outdated child, and its successor that is not ready yet.
        self._handover: tuple[Child, Child] | None = None

    def proceed(self, wanted: Sequence[ChildSpec], children: Sequence[Child]) -> None:
        """Start missing children, and continue with the replacement of outdated ones.

        An outdated child stands in for a missing one of its role until its successor is ready. If
        the successor dies before, the outdated child stays, and another successor is started.
        """
        if self._handover and not self._complete(*self._handover, children):
            return
        self._handover = None
        absent = missing(wanted, (each.spec for each in children if not each.is_outdated))
        outdated = [each for each in children if each.is_outdated]
        standing_in = Counter(each.role for each in outdated)
        for spec in absent:
            if standing_in[spec.role] > 0:
                standing_in[spec.role] -= 1
            elif self._may_start(spec) and not self._start(spec):
                return
        for old in outdated:
            if self._replace(old, absent):
                return

    def _replace(self, old: Child, absent: Sequence[ChildSpec]) -> bool:
        """Return False if no successor may be started yet."""
        successors = [each for each in absent if each.role == old.role]
        spec = next(filter(self._may_start, successors), None)
        if not successors:
            self._retire(old)
        elif spec and (new := self._start(spec)):
            self._handover = old, new
        return not successors or spec is not None

    def _complete(self, old: Child, new: Child, children: Sequence[Child]) -> bool:
        """Return whether the handover has ended. A successor that is ready replaces the child.

        A dead successor is one of the children until the supervisor has removed it.
        """
        if new.status.is_ready:
            if old in children:
                self._retire(old)
            return True
        if is_dead := new not in children:
            logger.error(
                "supervisor: the successor of %s (pid %s) died at its start; the %s goes on, and "
                "another successor is started.",
                old.role,
                old.pid,
                old.role,
            )
        return is_dead
