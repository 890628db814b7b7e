"""Helpers for a project's own tests: run its jobs, let time pass, and look what was enqueued."""

from .assertions import assert_enqueued, assert_not_enqueued, enqueued
from .coroutines import (
    aadvance,
    aassert_enqueued,
    aassert_not_enqueued,
    adrain,
    aenqueued,
    arun_job,
)
from .memory import InMemoryBackend
from .run import advance, drain, run_job

__all__ = [
    "InMemoryBackend",
    "aadvance",
    "aassert_enqueued",
    "aassert_not_enqueued",
    "adrain",
    "advance",
    "aenqueued",
    "arun_job",
    "assert_enqueued",
    "assert_not_enqueued",
    "drain",
    "enqueued",
    "run_job",
]
