"""A file of the library is read, parsed and indexed; what has changed is found by a scan, and summed up when it is indexed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import OperationalError, transaction

from django_dbqueue import Finish, batch, limit, pipeline, recurring, task

from . import library
from .models import Module, Scan
from .parsing import definitions

INDEX = "index"  # The queue of all three stages.
# Only the database's troubles pass. A file that is not Python fails at once.
STAGE: dict[str, Any] = {"queue_name": INDEX, "max_attempts": 3, "retry_on": (OperationalError,)}


@task(**STAGE, key=lambda path: path, version=lambda changed: changed)
def read(path: str, changed: int) -> str | Finish:
    """Whether there is anything new in a file. If it was only touched, the job ends here."""
    if Module.objects.filter(path=path, digest=library.digest(library.read(path))).exists():
        return Finish("as it was")
    return path


# What has begun goes on before more begins: the later a stage, the higher its priority.
@task(**STAGE, priority=1, concurrency=limit(2))
def parse(path: str) -> str:
    """Find out what a file defines. That is too much to be handed on with a job: it is noted with the module."""
    source, name = library.read(path), library.module_name(path)
    Module.objects.filter(path=path).note(library.digest(source), definitions(source, name))
    return path


@task(**STAGE, priority=2)
def index(path: str) -> int:
    """Have the search find what was parsed, instead of what was there before. Returns how many definitions there are."""
    return Module.objects.filter(path=path).index()


index_file = pipeline(read, parse, index)


@recurring(every=timedelta(seconds=30), drift=True)
@task
def scan() -> int:
    """Enqueue the files that are new or have changed since the last scan. Returns how many."""
    with transaction.atomic():
        if changed := Module.objects.take_changed(library.files()):
            with batch(
                on_finish=sum_up, description=f"Scan of the library: {len(changed):,} files"
            ) as files:
                index_file.enqueue_many(changed)
            Scan.objects.create(batch=files.id, files=len(changed))
    return len(changed)


@task
def sum_up(batch_id: str) -> str:
    """Note how a scan's files went, when the last of them is through."""
    return str(Scan.objects.filter(batch=batch_id).sum_up(batch.of(batch_id).progress()))
