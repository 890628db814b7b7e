"""Search of jobs: by id, task, queue, key, or by a value in their arguments and metadata."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.db.models import Q
from django.db.models.fields.json import KeyTransform
from django.utils.translation import gettext as _

from ..core.serialization import LONGEST_INTEGER_BITS
from ..models import Job, TaskState
from ..models.job import JobQuerySet
from ..registry import tasks_in
from .config import options
from .redaction import call_without_secrets, is_hidden, places_of, without_secrets
from .windows import Window

# A search for arguments or ends of ids, which no index holds, finds at most this many jobs.
FOUND = 500
# Maximum number of tasks to try with a key that is given without a task.
MOST_TASKS = 1000
# Part of an id, as lists show it: its beginning, its end, or both.
PART_OF_ID = re.compile("([0-9a-f-]{8,35})?(?:…|\\.\\.\\.)?([0-9a-f-]{8,35})?")
PREFIXES = ("queue", "task", "key")


class Search(NamedTuple):
    """Matching jobs, a sentence that says what was searched, and whether a window bounds it.

    None: the text says nothing of it, and the filters decide.
    """

    jobs: JobQuerySet
    said: str
    is_windowed: bool | None = False


def search(jobs: JobQuerySet, text: str, window: Window) -> Search:
    """Search jobs for a text. Each form is one index lookup, or reads the jobs of a window."""
    if not text:
        return Search(jobs, "", None)
    try:
        return Search(jobs.filter(pk=UUID(text)), _("Searched: the id."))
    except ValueError:
        prefix, colon, rest = text.partition(":")
    rest = rest.strip()
    if (part := PART_OF_ID.fullmatch(text.lower())) and any(part.groups()):
        begin, end = (each or "" for each in part.groups())
        return _by_part_of_id(jobs, begin, end, window)
    match prefix, colon:
        case "queue", ":":
            said = _("Searched: jobs of the queue %s.") % rest
            return Search(window.within(jobs).filter(queue=rest), said, True)
        case "task", ":":
            said = _("Searched: tasks whose path begins with %s.") % rest
            return Search(window.within(jobs).filter(task__startswith=rest), said, True)
        case "key", ":":
            said = _("Searched: the key %s, of the known tasks.") % rest
            return Search(jobs.filter(_with_key(rest)), said)
    if colon and prefix.isidentifier() and rest:
        return _by_value(jobs, prefix, rest, window)
    said = _("Searched: tasks with the name %s, or whose path begins with it.") % text
    by_name = Q(task__startswith=text) | Q(task__endswith=f".{text}")
    return Search(window.within(jobs).filter(by_name), said, True)


def _by_part_of_id(jobs: JobQuerySet, begin: str, end: str, window: Window) -> Search:
    begin, end = begin.replace("-", ""), end.replace("-", "")
    first, last = (UUID(begin.ljust(32, digit)[:32]) for digit in "0f")
    beginning = jobs.filter(pk__range=(first, last)) if begin else jobs
    ids = []
    if begin and not end:
        ids = list(beginning.values_list("pk", flat=True)[:FOUND])
    # One part alone may be the beginning or the end.
    if begin and end:
        ending = beginning.filter(pk__endswith=end)
    else:
        ending = window.within(jobs).filter(pk__endswith=end or begin)
    ids += ending.values_list("pk", flat=True)[:FOUND]
    said = _("Searched: ids with this beginning or this end.")
    return Search(jobs.filter(pk__in=ids), said, not (begin and end))


def _by_value(jobs: JobQuerySet, name: str, text: str, window: Window) -> Search:
    """Search for jobs with an argument or metadata of this name and value.

    Only values that the job's page shows are found: hidden ones must not be guessed.
    """
    if is_hidden(name):
        said = _("Values of %s are hidden, and are not searched.") % name
        return Search(jobs.none(), said)
    values = _values(text)
    if name in options().indexed_arguments and connections[jobs.db].vendor == "postgresql":
        return _by_index(jobs, name, text, window)
    tasks = {*tasks_in(options().task_modules), *Job.objects.recent_tasks()}
    places = {(task, place) for task in tasks for place in places_of(task, name)}
    # By aliases: a name such as "contains" would be a lookup in a keyword argument.
    named = {
        "in_kwargs": KeyTransform(name, "kwargs"),
        "in_metadata": KeyTransform(name, "metadata"),
    }
    by_place = {f"at_{place}": KeyTransform(str(place), "args") for _task, place in places}
    wanted = Q()
    for value in values:
        wanted |= Q(in_kwargs=value) | Q(in_metadata=value)
        for task, place in places:
            wanted |= Q(**{f"at_{place}": value}, task=task)
    rows = window.within(jobs).alias(**named, **by_place).filter(wanted)
    said = _("Searched: %(name)s = %(value)s in arguments and metadata.")
    found = jobs.filter(pk__in=_shown(rows, name, values, window))
    return Search(found, said % {"name": name, "value": text}, True)


def _by_index(jobs: JobQuerySet, name: str, text: str, window: Window) -> Search:
    """Search all jobs for a keyword argument or metadata that has an index."""
    values = _values(text)
    ids = []
    for column in ("kwargs", "metadata"):
        rows = jobs.alias(value=KeyTransform(name, column)).filter(value__in=values)
        ids += _shown(rows, name, values, window)
    said = _("Searched: %(name)s = %(value)s in keyword arguments and metadata, by their index.")
    # Of two full lists, the one that goes back less far ends the window.
    found = jobs.filter(pk__in=ids)
    found = window.within(found) if window.most else found
    return Search(found, said % {"name": name, "value": text}, bool(window.most))


def _shown(rows: JobQuerySet, name: str, values: list[Any], window: Window) -> list[UUID]:
    """Return the ids of the newest jobs that show one of the values; all, in an open window."""
    rows = rows.order_by("-pk").select_related(None).only("task", "args", "kwargs", "metadata")
    found: list[Any] = list(rows if window.is_open else rows[: FOUND + 1])
    if len(found) > FOUND and not window.is_open:
        found = found[:FOUND]
        if not window.most or found[-1].pk > window.first:
            window.end_at(found[-1].pk, FOUND)
    return [job.pk for job in found if _shows(job, name, values)]


def _values(text: str) -> list[Any]:
    """Return the values that a text may mean: "17" is a text and a number."""
    try:
        value = json.loads(text, parse_constant=str)
    except ValueError:
        return [text]
    is_one = (isinstance(value, int) and value.bit_length() <= LONGEST_INTEGER_BITS) or (
        isinstance(value, float) and math.isfinite(value)
    )
    return [text, value] if is_one else [text]


def _shows(job: Job, name: str, values: Iterable[Any]) -> bool:
    args, kwargs = call_without_secrets(job)
    documents = (kwargs, without_secrets(job.metadata))
    found = [each.get(name) for each in documents if isinstance(each, dict)]
    if isinstance(args, list):
        found += [args[place] for place in places_of(job.task, name) if place < len(args)]
    return any(value in values for value in found)


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
