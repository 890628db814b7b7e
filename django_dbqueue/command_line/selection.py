"""The jobs that the arguments of a command name: by their ids, or by filters."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError

from ..backend import DatabaseBackend
from ..core.error_reports import clean
from ..models import Execution, Failure, Job
from ..models.enums import State
from ..models.job import JobQuerySet

FILTERS = ("state", "queue", "task", "key", "batch", "failure")


def add_filters(parser: ArgumentParser) -> None:
    """Add the options that filter jobs."""
    parser.add_argument("--state", choices=State.values, help="Jobs in this state.")
    parser.add_argument("--queue", type=as_text, help="Jobs of this queue.")
    parser.add_argument(
        "--task", type=as_text, metavar="PATH", help="Jobs of this task: shop.tasks.confirm."
    )
    parser.add_argument("--key", type=as_text, help="Jobs with this key, of any task or of --task.")
    parser.add_argument("--batch", type=UUID, metavar="ID", help="Jobs of this batch.")
    parser.add_argument(
        "--failure", type=int, metavar="NUMBER", help="Jobs whose last attempt failed like this."
    )


def as_text(text: str) -> str:
    """Return an argument. Raises ArgumentTypeError for bytes of the shell that are not UTF-8."""
    if text != clean(text):
        raise ArgumentTypeError(f"{text!r} is not text that a database stores. Give it in UTF-8.")
    return text


def filtered(backend: DatabaseBackend, options: Mapping[str, Any]) -> JobQuerySet:
    """Return the jobs that pass all filters. Raises CommandError for an unknown failure."""
    rows = Job.objects.using(backend.database)
    if (number := options["failure"]) is not None:
        failures = Failure.objects.using(backend.database).filter(pk=number)
        if not failures:
            raise CommandError(f"There is no failure {number}. See: manage.py queue failures --all")
        rows = Execution.objects.using(backend.database).affected_jobs(failures)
    for name in ("state", "queue", "task", "batch"):
        if options[name] is not None:
            rows = rows.filter(**{name: options[name]})
    if (key := options["key"]) is not None:
        task = options["task"]
        # The column holds the path of the task, a space, and the key.
        rows = rows.filter(key=f"{task} {key}") if task else rows.filter(key__endswith=f" {key}")
    return rows


def selected(backend: DatabaseBackend, options: Mapping[str, Any]) -> JobQuerySet:
    """Return the jobs that a verb is to change.

    Raises CommandError without ids or filters: all jobs must be asked for, and for unknown ids.
    """
    ids: Sequence[UUID] = options["ids"]
    if sum(_given(options)) != 1:
        raise CommandError(
            "Give the ids of jobs, or filters such as --queue and --task, or --all for all jobs."
        )
    rows = filtered(backend, options)
    if not ids:
        return rows
    found = rows.filter(pk__in=ids)
    if others := set(ids).difference(found.values_list("pk", flat=True)):
        raise CommandError(f"{missing(others, backend)} Nothing is changed.")
    return found


def is_given(options: Mapping[str, Any]) -> bool:
    """Return whether any jobs are named."""
    return any(_given(options))


def _given(options: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Return whether there are ids, filters, and ``--all``."""
    has_filter = any(options[name] is not None for name in FILTERS)
    return bool(options["ids"]), has_filter, options["all"]


def missing(ids: Iterable[UUID], backend: DatabaseBackend) -> str:
    """Return the message about jobs that a backend does not have."""
    return (
        f"The backend {backend.alias!r} has no job {', '.join(sorted(map(str, ids)))}. It may have "
        "been deleted, or be one of another backend: see --backend."
    )
