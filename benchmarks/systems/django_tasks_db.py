"""django-tasks-db: a worker is one process with one thread; as many as others have threads.

They are forks of one, which takes less memory and starts sooner than separate processes. It
enqueues many jobs one by one.
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
    ended = """
        SELECT count(*) FROM django_tasks_database_dbtaskresult
        WHERE status IN ('SUCCESSFUL', 'FAILED')
    """

    def work(self, processes: int, threads: int) -> None:
        from django.core.management import call_command

        fork(processes * threads)
        call_command("db_worker")
