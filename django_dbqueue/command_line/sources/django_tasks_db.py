"""django-tasks-db: one table, which has a time in the year 9999 for jobs without one."""

from __future__ import annotations

from typing import Any

from .source import Source, Waiting

NO_TIME = 9999


class DjangoTasksDb(Source):
    name, app = "django-tasks-db", "django_tasks_database"
    order = ("-priority", "run_after", "enqueued_at")

    def parts(self) -> list[Any]:
        return [self.model("DBTaskResult").objects.filter(status="READY")]

    def read(self, row: Any) -> Waiting:
        has_time = row.run_after is not None and row.run_after.year != NO_TIME
        return Waiting(
            task=row.task_path,
            args=row.args_kwargs["args"],
            kwargs=row.args_kwargs["kwargs"],
            queue=row.queue_name,
            priority=row.priority,
            run_after=row.run_after if has_time else None,
        )
