"""django-tasks-db: a worker has one thread and one process, so that there are as many processes as others have threads.

They are forks of one, which costs less memory and a shorter start than if each were started by itself. It enqueues many one by
one.
"""

from __future__ import annotations

from . import Rival, fork


class Adapter(Rival):
    requires = ("django-tasks-db",)
    apps = ("django_tasks_db",)
    backlog = 7000
    settings = {
        "TASKS": {"default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": ["default"]}}
    }
    ended = "SELECT count(*) FROM django_tasks_database_dbtaskresult WHERE status IN ('SUCCESSFUL', 'FAILED')"

    def work(self, processes: int, threads: int) -> None:
        from django.core.management import call_command

        fork(processes * threads)
        call_command("db_worker")
