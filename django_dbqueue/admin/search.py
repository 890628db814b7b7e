"""Query syntax of the search box above the jobs.

Each form is one index lookup, or a scan that ends when the list is full.
"""

from __future__ import annotations

from uuid import UUID

from django.db.models import Q

from ..models import Job, TaskState

# Maximum number of tasks to try with a key that is given without a task.
MOST_TASKS = 1000


def asked(text: str) -> Q:
    if not text:
        return Q()
    try:
        return Q(pk=UUID(text))
    except ValueError:
        prefix, colon, rest = text.partition(":")
    match prefix, colon:
        case "queue", ":":
            return Q(queue=rest)
        case "task", ":":
            return Q(task__startswith=rest)
        case "key", ":":
            return _with_key(rest.strip())
    return Q(task__startswith=text) | Q(task__endswith=f".{text}")


def _with_key(text: str) -> Q:
    """Match jobs by key.

    The unique index holds each key after its task, so the lookup tries the key after each known
    task.
    """
    tasks = {*TaskState.objects.order_by("name").values_list("name", flat=True)[:MOST_TASKS]}
    tasks |= Job.objects.recent_keyed_tasks()
    name, _space, rest = text.partition(" ")
    of_any = [f"{task} {text}" for task in tasks]
    of_one = [f"{task} {rest}" for task in tasks if rest and task.endswith(f".{name}")]
    return Q(key__in=[text, *of_any, *of_one])
