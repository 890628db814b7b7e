"""What the jobs of a failure have in common, against jobs of the same tasks that succeed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.utils.translation import gettext as _

from ..core.in_common import Common, Trait, in_common
from ..models import Execution, Job
from ..models.enums import Outcome
from .redaction import HIDDEN, named_arguments, without_secrets

# The number of attempts that are compared; and of jobs among which those that succeeded are sought.
SAMPLE, SOUGHT = 200, 100_000
# Longer values are hardly ever alike.
LONGEST_VALUE = 100


def common_traits(failed: Sequence[Execution]) -> tuple[list[Common], int]:
    """Return what these attempts have in common, and the number of successes compared with.

    Hidden values are not compared.
    """
    succeeded = _successes({each.job.task for each in failed})
    found = in_common(
        [list(_traits(each)) for each in failed], [list(_traits(each)) for each in succeeded]
    )
    return found, len(succeeded)


def _successes(tasks: Iterable[str]) -> list[Execution]:
    jobs = Job.objects.among_newest(SOUGHT).filter(task__in=tasks, state=Job.State.SUCCESSFUL)
    ids = list(jobs.order_by("-pk").values_list("pk", flat=True)[:SAMPLE])
    rows = Execution.objects.filter(job__in=ids, outcome=Outcome.SUCCESSFUL)
    return list(rows.select_related("job").defer("log", "traceback")[:SAMPLE])


def _traits(execution: Execution) -> Iterator[Trait]:
    job: Job = execution.job
    yield _("task"), job.task
    yield _("queue"), job.queue
    yield _("priority"), job.priority
    yield _("attempt"), execution.attempt - job.attempts_before
    if execution.release:
        yield _("release"), execution.release
    if host := execution.process.partition("@")[2].partition(":")[0]:
        yield _("host"), host
        yield _("process"), execution.process
    yield from _readable(named_arguments(job))
    if isinstance(job.metadata, dict):
        named = {f"metadata.{name}": each for name, each in job.metadata.items()}
        yield from _readable(without_secrets(named))


def _readable(named: Any) -> Iterator[Trait]:
    for name, value in named.items():
        if (text := _text(value)) is not None:
            yield name, text


def _text(value: object) -> str | None:
    if value == HIDDEN:
        return None
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=repr)
    return text if len(text) <= LONGEST_VALUE and HIDDEN not in text else None
