"""``manage.py runjob``: run the task of a job in this process, for a debugger."""

from __future__ import annotations

import pdb  # noqa: T100
import traceback
from argparse import ArgumentParser
from contextlib import nullcontext
from typing import Any
from uuid import UUID

from asgiref.sync import async_to_sync
from django.core.management.base import BaseCommand, CommandError
from django.db import transaction
from django.utils import timezone

from ...backend import DatabaseBackend
from ...compat import task_backends
from ...exceptions import InvalidTaskPath
from ...models import ClaimedJob
from ...registry import discover, load
from ...runtime.worker.attempt import Attempt
from ...runtime.worker.task_call import ThreadCall
from ...tasks import is_coroutine


class Command(BaseCommand):
    help = (
        "Run the task of a job in this process, with the job's arguments. The job itself stays as "
        "it is, its metadata too, and no attempt is recorded: to run it again, retry it. Timeouts "
        "and limits do not apply. What the task does, such as sending a mail, is done."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("id", type=UUID, help="The job's id, as its page in the admin shows.")
        parser.add_argument("--backend", help="The alias in TASKS of the job's backend.")
        parser.add_argument(
            "--pdb", action="store_true", help="Start the debugger where the task fails."
        )

    def handle(self, *args: object, **options: Any) -> None:
        job, backend = _found(options["id"], options["backend"])
        function = _function(job, backend)
        try:
            with transaction.atomic(backend.database) if _is_atomic(job) else nullcontext():
                value = function()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Also the task's request to run again later.
            if not options["pdb"]:
                raise
            self.stderr.write("".join(traceback.format_exception(error)))
            pdb.post_mortem(error.__traceback__)
        else:
            self.stdout.write(f"{job.task} returned {value!r}.")
        self.stdout.write(f"The job {job.pk} is unchanged: {job.state.upper()}.")


def _found(pk: UUID, alias: str | None) -> tuple[ClaimedJob, DatabaseBackend]:
    """Return the job, and a backend of its database."""
    backends = [
        each
        for each in map(task_backends.__getitem__, task_backends)
        if isinstance(each, DatabaseBackend) and alias in (None, each.alias)
    ]
    for backend in backends:
        rows: Any = ClaimedJob.objects.using(backend.database)
        if job := rows.filter(pk=pk).first():
            return job, backend
    names = ", ".join(each.alias for each in backends)
    raise CommandError(
        f"No job has the id {pk} in the backends {names}. It may have been deleted."
        if backends
        else f"TASKS has no DatabaseBackend {alias or ''}".rstrip() + "."
    )


def _function(job: ClaimedJob, backend: DatabaseBackend) -> Any:
    discover(backend.config.task_modules)
    job.claimed_at, job.process = timezone.now(), None
    attempt = Attempt(ThreadCall(job), backend)
    try:
        attempt.task = load(job.task)
        function = attempt.function()
    except InvalidTaskPath as error:
        raise CommandError(str(error)) from error
    return async_to_sync(function) if is_coroutine(function.func) else function


def _is_atomic(job: ClaimedJob) -> bool:
    return bool(load(job.task).atomic)
