"""Django's own tests of the Tasks framework, run on this backend. ``fetch.py`` downloads them."""

from __future__ import annotations

import os
import sys

import pytest
from django.test import TransactionTestCase, override_settings

from django_dbqueue import compat, testing
from django_dbqueue.backend import DatabaseBackend

from .fetch import FOLDER

if not FOLDER.exists():
    reason = "Django's own tests are not here. Run: python -m tests.conformance.fetch"
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)

sys.path.insert(0, str(FOLDER))
from tasks import tasks, test_immediate_backend, test_tasks

IMMEDIATE = f"{'django.tasks' if 'django.tasks' in sys.modules else 'django_tasks'}.backends.immediate.ImmediateBackend"
OURS = "django_dbqueue.backend.DatabaseBackend"


class DrainedBackend(DatabaseBackend):
    """Runs each job before ``enqueue`` returns, as the immediate backend does."""

    def enqueue(self, task, args, kwargs):
        result = super().enqueue(task, args, kwargs)
        testing.drain(self.alias)
        result.refresh()
        return result


def without(case, *names):
    """The case without the tests that are about another backend's own ways."""
    return type(f"Our{case.__name__}", (case,), dict.fromkeys(names))


@override_settings(
    TASKS={
        "default": {"BACKEND": OURS, "QUEUES": ["default", "queue_1"]},
        "immediate": {"BACKEND": IMMEDIATE, "QUEUES": []},
        "missing": {"BACKEND": "does.not.exist"},
    },
    USE_TZ=True,
)
class TestAsABackend(
    without(
        test_tasks.TaskTestCase,
        # Inspect the dummy backend's list of results, or its class.
        "test_using_correct_backend",
        "test_enqueue_task",
        "test_enqueue_task_async",
        "test_get_backend",
        # Refreshes a result with the ORM inside a coroutine, which Django forbids.
        "test_refresh_result",
        # As above.
        "test_get_missing_result",
    ),
    TransactionTestCase,
):
    databases = {"default"}

    def setUp(self):
        """The original clears the dummy backend."""

    def test_get_missing_result(self):
        for wrong in ["123", "", "01a1fde5-c590-7c51-99fc-5d61776db55a", None, 7, "x" * 64]:
            with self.assertRaises(compat.TaskResultDoesNotExist):
                tasks.noop_task.get_result(wrong)

    async def test_refresh_result_in_a_coroutine(self):
        result = await tasks.noop_task.aenqueue()
        before = repr(result)
        await result.arefresh()
        self.assertEqual(repr(result), before)


@override_settings(TASKS={"default": {"BACKEND": f"{__name__}.DrainedBackend", "QUEUES": []}})
class TestAsAWorker(
    without(
        test_immediate_backend.ImmediateBackendTestCase,
        # About what the immediate backend is and cannot do.
        "test_using_correct_backend",
        "test_cannot_get_result",
        "test_cannot_refresh_result",
        "test_cannot_pass_run_after",
        # Override the settings with the immediate backend.
        "test_validate_on_enqueue",
        "test_validate_on_aenqueue",
    ),
    TransactionTestCase,
):
    databases = {"default"}
