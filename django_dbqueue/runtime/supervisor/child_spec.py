"""Child specification: what a supervisor needs to start a child, and to start it again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...core.options import Options
from ...core.queue_selector import QueueSelector


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """Specification of a child.

    role: its name in ROLES.
    changes: its changes to the backend's OPTIONS: those of its group of workers, and those of the
        command line.
    options: the options that result.
    """

    role: str
    changes: dict[str, object]
    options: Options


def specs(config: Options, roles: Sequence[str], changes: dict[str, object]) -> list[ChildSpec]:
    """Return the children of a supervisor for these roles: workers by group, and one of each other.

    With ``embedded``, each group is one worker. Raises InvalidOption for invalid changes.
    """
    found = []
    for role in roles:
        for own in config.groups(changes) if role == "worker" else [changes]:
            options = config.changed(**own)
            spec = ChildSpec(role=role, changes=own, options=options)
            is_one = role != "worker" or options.embedded
            found += [spec] * (1 if is_one else options.processes)
    return found


def selectors(found: Iterable[ChildSpec], queues: frozenset[str]) -> list[QueueSelector]:
    """Return the queues that these children serve: one selector for each different group.

    ``queues`` are the backend's QUEUES. Raises InvalidOption for a pattern that matches none.
    """
    patterns = dict.fromkeys(spec.options.queues for spec in found)
    return [QueueSelector(each, queues) for each in patterns]


def missing(wanted: Sequence[ChildSpec], present: Iterable[ChildSpec]) -> list[ChildSpec]:
    """Return the wanted children that are not present; a specification may occur several times."""
    left = list(wanted)
    for spec in present:
        if spec in left:
            left.remove(spec)
    return left
