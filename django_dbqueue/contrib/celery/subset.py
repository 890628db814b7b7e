"""The refusal of what is not served, and the options that need nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ...core.documentation import reference

# Options for which nothing needs to be done, with their accepted values.
NEED_NOTHING: dict[str, tuple[object, ...]] = {
    "acks_on_failure": (True,),
    "acks_on_failure_or_timeout": (True,),
    "acks_on_timeout": (True,),
    "ignore_result": (True, False),
    "reject_on_worker_lost": (True,),
    "retry": (True, False),
    "retry_on_worker_lost": (True,),
    "send_events": (True, False),
    "serializer": ("json",),
    "store_errors_even_if_ignored": (True, False),
    "track_started": (True, False),
    "trail": (True, False),
    "typing": (True,),
}
_HOOK = "Use a receiver of the signal task_finished."
_NOT_TWICE = "For a task that must not run twice, give acks_late=False."
_RETRIED = "For a task that is retried, give autoretry_for=."
_QUEUE = "Give queue=."
_METADATA = "Use @task, and task.using(metadata=...)."
_ANOTHER = "Enqueue another job."
# By the name of the option. Any other is refused with a general remedy.
REMEDIES = {
    "acks_on_failure": _RETRIED,
    "acks_on_failure_or_timeout": _RETRIED,
    "acks_on_timeout": _RETRIED,
    "after_return": _HOOK,
    "args": _ANOTHER,
    "base": "Write a decorator of your function, or a receiver of the signal task_finished.",
    "before_start": "Use a receiver of the signal task_started.",
    "compression": "Arguments are JSON, not compressed. Leave it out.",
    "exchange": _QUEUE,
    "headers": _METADATA,
    "kwargs": _ANOTHER,
    "link": "Use chain().",
    "link_error": "Use a receiver of the signal task_finished, or a batch with on_finish.",
    "on_failure": _HOOK,
    "on_retry": "Use a TaskMiddleware, whose ended() has each attempt.",
    "on_success": "Use chain(), or a receiver of the signal task_finished.",
    "pydantic": "Pass model.model_dump(mode='json').",
    "reject_on_worker_lost": _NOT_TWICE,
    "retry_on_worker_lost": _NOT_TWICE,
    "routing_key": _QUEUE,
    "serializer": "Arguments are JSON: pass a primary key or text.",
    "shadow": _METADATA,
    "task_id": "The queue makes the id. For one job at a time, use @task(key=...).",
    "throw": "Enqueue another job, or call retry() last.",
    "throws": "Use @task(discard_on=...).",
    "typing": "Arguments are always checked. Leave it out.",
}


def refuse(where: str, name: str, value: object, remedy: str = "") -> NoReturn:
    remedy = remedy or REMEDIES.get(name, "Leave it out, or use @task of django_dbqueue.")
    raise TypeError(
        f"{where}: {name}={value!r} is not served by django_dbqueue.contrib.celery. {remedy} "
        f"See {reference('from_celery', 'refused')}."
    )


class Subset:
    """Base of the classes that have a part of the attributes of Celery's."""

    __slots__ = ()

    if not TYPE_CHECKING:  # A type checker then finds such an attribute itself.

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"{type(self).__name__} of django_dbqueue.contrib.celery has no {name!r}. "
                f"See {reference('from_celery', 'refused')}."
            )
