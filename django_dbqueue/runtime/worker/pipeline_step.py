"""The next step of a pipeline job after a stage has returned."""

from __future__ import annotations

from typing import Any

from ...backend import DatabaseBackend
from ...core import serialization
from ...models import Job
from ...models.enums import State
from ...pipelines import FanOut, Finish, GoTo


def after_stage(job: Any, value: object, backend: DatabaseBackend) -> dict[str, Any]:
    """Return the settlement of a stage: the state, and the result, the next stage or the new jobs.

    Raises TypeError or ValueError if the pipeline has no such step.
    """
    following = job.stage + 1
    match value:
        case Finish():
            return _end(job, value.value)
        case FanOut():
            _must_be(job, following)
            children = [_at(job, following, each, backend) for each in value.values]
            return {"children": children, **_end(job, [str(child.pk) for child in children])}
        case GoTo():
            return {
                "then": _at(job, _place_of(job, value), value.value, backend),
                "state": State.READY,
            }
    if following == len(job.pipeline):
        return _end(job, value)
    return {"then": _at(job, following, value, backend), "state": State.READY}


def _end(job: Job, value: object) -> dict[str, object]:
    return {
        "state": State.SUCCESSFUL,
        "result": serialization.to_json(value, of=f"The return value of {job.task}"),
    }


def _at(job: Job, place: int, value: object, backend: DatabaseBackend) -> Job:
    """Return the job as it is at that stage."""
    value = serialization.to_json(value, of=f"The return value of {job.task}")
    there = backend.at_stage(job.pipeline, place, value)
    there.batch_id, there.metadata, there.expires_at = job.batch_id, job.metadata, job.expires_at
    if there.source:
        there.source["job"] = str(job.pk)
    return there


def _place_of(job: Any, wanted: GoTo) -> int:
    """Index of the task's next stage after the current one; its first stage if none follows."""
    path = getattr(wanted.stage, "module_path", wanted.stage)
    places = [place for place, stage in enumerate(job.pipeline) if stage["task"] == path]
    if not places:
        there = ", ".join(stage["task"] for stage in job.pipeline)
        raise ValueError(
            f"{job.task} returned GoTo({path!r}), which is no stage of its pipeline: {there}."
        )
    return next((place for place in places if place > job.stage), places[0])


def _must_be(job: Job, place: int) -> None:
    if place >= len(job.pipeline):
        raise ValueError(
            f"{job.task} returned FanOut(...), but is the last stage of its pipeline. "
            "Return FanOut from an earlier stage."
        )
