"""Log lines of structlog."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
from structlog.contextvars import merge_contextvars

from django_dbqueue import task
from django_dbqueue.testing import drain

from .conftest import with_options

pytestmark = pytest.mark.django_db


@task(queue_name="mail")
def logs() -> None:
    structlog.get_logger().info("sent", to="a@example.com")


@task(queue_name="mail")
async def logs_in_a_coroutine() -> None:
    structlog.get_logger().info("sent", to="a@example.com")


@pytest.mark.parametrize("function", [logs, logs_in_a_coroutine])
def test_lines_of_a_task_have_the_fields_of_its_job(function: Any) -> None:
    with (
        with_options(middleware=["django_dbqueue.contrib.structlog.StructlogMiddleware"]),
        structlog.testing.capture_logs(processors=[merge_contextvars]) as lines,
    ):
        result = function.enqueue()
        drain()
        structlog.get_logger().info("after")

    assert lines[0].pop("process_name").startswith("drain:")
    assert lines == [
        {
            "event": "sent",
            "to": "a@example.com",
            "log_level": "info",
            "job_id": result.id,
            "task": function.module_path,
            "queue": "mail",
            "attempt": 1,
        },
        {"event": "after", "log_level": "info"},
    ]
