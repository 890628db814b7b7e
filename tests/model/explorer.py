"""Breadth-first search of all reachable worlds: the first violation has a shortest story."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from .database import Violation
from .steps import Model
from .world import World


class Explored(NamedTuple):
    """``calls``: of the engine. ``story``: the steps and the violation, empty if none is found."""

    worlds: int
    steps: int
    calls: int
    seconds: float
    story: list[str]

    def __str__(self) -> str:
        size = f"{self.worlds:,} worlds, {self.steps:,} steps, {self.calls:,} calls of the engine, {self.seconds:.1f} s"
        return size + "".join(f"\n  {line}" for line in self.story)


def explore(model: Model) -> Explored:
    """Explore until the first violation."""
    began, steps = time.monotonic(), 0
    start = model.start().canonical()
    came: dict[World, tuple[World | None, str]] = {start: (None, "")}
    waiting = deque([start])

    def explored(story: list[str]) -> Explored:
        return Explored(len(came), steps, model.database.calls, time.monotonic() - began, story)

    while waiting:
        world = waiting.popleft()
        try:
            model.check_liveness(world)
        except Violation as violation:
            return explored([*_story(came, world), *violation.args])
        for step in model.steps(world):
            steps += 1
            try:
                description, following = step()
            except Violation as violation:
                return explored([*_story(came, world), *violation.args])
            following = following.canonical()
            if following not in came:
                came[following] = (world, description)
                waiting.append(following)
    return explored([])


def _story(came: dict[World, tuple[World | None, str]], world: World) -> list[str]:
    story: list[str] = []
    at: World | None = world
    while at and (description := came[at][1]):
        story.append(description)
        at = came[at][0]
    return story[::-1]
