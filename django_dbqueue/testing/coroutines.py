"""The helpers for tests that are coroutines, such as ``async def test_…`` of a ``TestCase``.

Each runs its namesake on the thread that has the test's connections.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async

from . import assertions, run

P = ParamSpec("P")
R = TypeVar("R")


def _coroutine_of(helper: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    @wraps(helper)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return await sync_to_async(helper)(*args, **kwargs)

    call.__name__ = call.__qualname__ = f"a{helper.__name__}"
    call.__module__ = __name__
    call.__doc__ = f"As ``{helper.__name__}()``, in a coroutine."
    return call


aadvance = _coroutine_of(run.advance)
aassert_enqueued = _coroutine_of(assertions.assert_enqueued)
aassert_not_enqueued = _coroutine_of(assertions.assert_not_enqueued)
adrain = _coroutine_of(run.drain)
aenqueued = _coroutine_of(assertions.enqueued)
arun_job = _coroutine_of(run.run_job)
