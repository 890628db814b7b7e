"""Tasks: a scan finds changed files, a pipeline reads, parses and indexes each of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import OperationalError, transaction

from django_dbqueue import Finish, batch, limit, pipeline, recurring, task

from . import library
from .models import Module, Scan
from .parsing import definitions

INDEX = "index"  # The queue of all three stages.
# Only database errors are retried. A file that is not Python fails at once.
STAGE: dict[str, Any] = {"queue_name": INDEX, "max_attempts": 3, "retry_on": (OperationalError,)}


@task(**STAGE, key=lambda path: path, version=lambda changed: changed)
def read(path: str, changed: int) -> str | Finish:
    """Compare a file with its indexed version. If it was only touched, the job ends here."""
    if Module.objects.filter(path=path, digest=library.digest(library.read(path))).exists():
        return Finish("as it was")
    return path


# Started jobs finish before others start: the later a stage, the higher its priority.
@task(**STAGE, priority=1, concurrency=limit(2))
def parse(path: str) -> str:
    """Parse a file. The result is stored with the module: it is too large for a job's value."""
    source, name = library.read(path), library.module_name(path)
    Module.objects.filter(path=path).note(library.digest(source), definitions(source, name))
    return path


@task(**STAGE, priority=2)
def index(path: str) -> int:
    """Replace a file's definitions in the search index. Returns their number."""
    return Module.objects.filter(path=path).index()


index_file = pipeline(read, parse, index)


@recurring(every=timedelta(seconds=30), drift=True)
@task
def scan() -> int:
    """Enqueue files that are new or changed since the last scan. Returns their number."""
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
    """Store the results of a scan, when its last file has been processed."""
    return str(Scan.objects.filter(batch=batch_id).sum_up(batch.of(batch_id).progress()))
