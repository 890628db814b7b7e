"""Backoff strategies: the delay before a failed job is retried.

A backoff is any callable ``(exception, task_result) -> seconds | None``; None means no retry. The
result has the ``errors`` of the attempts so far, with the current one. The names are those of
Django's open proposal for retries (new-features #142).

Each strategy also takes ``cap``, the longest delay in seconds (default: 3600), and ``jitter``, from
0 to 1 (default: 0.1): each delay, after the cap, is multiplied by a random number from
``1 - jitter`` to ``1 + jitter``. Both are keyword arguments. A number below 0, or a jitter above 1,
raises ValueError.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Backoff = Callable[[BaseException, Any], "float | None"]


@dataclass(frozen=True, kw_only=True)
class _Strategy:
    """Base of the strategies.

    cap: the longest delay, in seconds.
    jitter: the largest fraction by which each delay is spread, up and down.
    """

    cap: float = 3600.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value < float("inf")
            ):
                raise ValueError(
                    f"{type(self).__name__}({name}={value!r}): give a number of at least 0."
                )
        if self.jitter > 1:
            raise ValueError(
                f"{type(self).__name__}(jitter={self.jitter!r}): give a fraction of the delay, "
                "from 0 to 1."
            )

    def __call__(self, exception: BaseException, task_result: Any) -> float:
        wait = min(self.cap, self.seconds(max(1, len(task_result.errors))))
        return wait * random.uniform(1 - self.jitter, 1 + self.jitter)

    def seconds(self, failures: int) -> float:
        """Return the delay after a number of failures, in seconds, before cap and jitter."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(_Strategy):
    """The same delay, ``delay`` seconds, after every failure."""

    delay: float = 5.0

    def seconds(self, failures: int) -> float:
        return self.delay


@dataclass(frozen=True)
class Linear(_Strategy):
    """``step`` seconds after the first failure, twice that after the second, and so on."""

    step: float = 5.0

    def seconds(self, failures: int) -> float:
        return self.step * failures


@dataclass(frozen=True)
class Exponential(_Strategy):
    """``first`` seconds after the first failure, ``factor`` times as long after each next one."""

    first: float = 5.0
    factor: float = 2.0

    def seconds(self, failures: int) -> float:
        # Beyond 64 doublings every cap is reached, and the power of a large factor would overflow.
        return self.first * self.factor ** min(failures - 1, 64)
