"""What the members of one group have in common, and those of another have not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

# A name with a value, such as ("queue", "mail").
Trait = tuple[str, Hashable]
# A trait is reported from this many members on, and from this difference of the shares on.
LEAST_MEMBERS, LEAST_DIFFERENCE = 2, 0.2


class Common(NamedTuple):
    """A trait, and the shares of both groups that have it, from 0 to 1.

    ``elsewhere`` is None if there is nothing to compare with.
    """

    name: str
    value: Hashable
    share: float
    elsewhere: float | None

    @property
    def percent(self) -> int:
        return round(100 * self.share)

    @property
    def percent_elsewhere(self) -> int:
        return round(100 * (self.elsewhere or 0.0))


def in_common(
    members: Sequence[Iterable[Trait]], others: Sequence[Iterable[Trait]], most: int = 8
) -> list[Common]:
    """Return the traits whose shares differ most from those of the others, at most ``most``.

    Without others, the traits of most members. A trait that all others have as often is left out.
    """
    here, there = _shares(members), _shares(others)
    number = len(members)
    found = [
        Common(name, value, share, there.get((name, value), 0.0) if others else None)
        for (name, value), share in here.items()
        if share * number >= LEAST_MEMBERS
    ]
    telling = [each for each in found if _difference(each) >= LEAST_DIFFERENCE]
    return sorted(telling, key=lambda each: (-_difference(each), -each.share, each.name))[:most]


def _difference(common: Common) -> float:
    return common.share - (common.elsewhere or 0.0)


def _shares(members: Sequence[Iterable[Trait]]) -> dict[Trait, float]:
    numbers = Counter(trait for traits in members for trait in set(traits))
    return {trait: number / len(members) for trait, number in numbers.items()}
