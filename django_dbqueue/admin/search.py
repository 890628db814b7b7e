"""What the search box above the jobs understands. Each way is one look into an index, or ends where the list is full."""

from __future__ import annotations

from uuid import UUID

from django.db.models import Q

from ..models import Job, KnownTask

# So many tasks are tried with a key that is given alone.
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
    """The unique index has keys behind their tasks: so the key is sought behind each task that is known here."""
    tasks = {*KnownTask.objects.order_by("name").values_list("name", flat=True)[:MOST_TASKS]}
    tasks |= Job.objects.recent_keyed_tasks()
    name, _space, rest = text.partition(" ")
    of_any = [f"{task} {text}" for task in tasks]
    of_one = [f"{task} {rest}" for task in tasks if rest and task.endswith(f".{name}")]
    return Q(key__in=[text, *of_any, *of_one])
