"""Names of Celery that this package does not have, each with a remedy."""

from __future__ import annotations

from typing import NoReturn

from ...compat import signals
from ...core.documentation import reference

# Of the modules celery, celery.canvas, celery.exceptions, celery.result, celery.schedules,
# celery.signals and celery.utils: names by their remedy.
_NAMES = {
    "Celery current_app": (
        "There is no app: the settings are TASKS. Replace @app.task by @shared_task, and start "
        "workers by runqueue."
    ),
    "current_task": "Give @shared_task bind=True, and pass self on.",
    "Task": "Write a decorator of the function, or a receiver of the signal task_finished.",
    "signature maybe_signature subtask": "Write task.s() or task.si().",
    "xmap xstarmap chunks": "Use a group, or enqueue_many() of django_dbqueue.",
    "uuid": "Use uuid.uuid4() of Python.",
    "ResultSet EagerResult ResultBase result_from_tuple": (
        "Keep the id: AsyncResult(id). The results of a group are a GroupResult."
    ),
    "TimeoutError": "get() raises Python's own TimeoutError: remove the import.",
    "Ignore": "Return from the task, or use @task(discard_on=...) of django_dbqueue.",
    "Reject": "Use context.snooze() in a task with @task(takes_context=True) of django_dbqueue.",
    "TaskPredicate": "Catch Retry, which is no Exception.",
    "TimeLimitExceeded Terminated WorkerLostError": (
        "It cannot be caught, in Celery or here: the admin shows how the attempt has ended."
    ),
    "ChordError TaskError CeleryError BackendError BackendGetMetaError BackendStoreError": (
        "get() raises TaskFailed."
    ),
    "OperationalError": "Import it from django.db: a job is a row.",
    "AlreadyRegistered NotRegistered InvalidTaskError QueueNotFound IncompleteStream": (
        "It is not raised: see the table of exceptions."
    ),
    "ImproperlyConfigured NotConfigured SecurityError": (
        "Import ImproperlyConfigured from django.core.exceptions."
    ),
    "WorkerShutdown WorkerTerminate": "No task can end its worker. Send SIGTERM to runqueue.",
    "CeleryWarning AlwaysEagerIgnored": "It is not issued: remove the import.",
    "schedule maybe_schedule": "Use @recurring(every=timedelta(...)) of django_dbqueue.",
    "solar": "Write a task at noon that computes the time, and calls apply_async() with eta=.",
    "crontab_parser ParseException": "Use Cron of django_dbqueue.recurrence.cron.",
    "get_task_logger": "Use logging.getLogger().",
    "states": "Write the state as text: 'SUCCESS'.",
    "app beat bootsteps exceptions result schedules signals utils": (
        "Import the names that it has from django_dbqueue.contrib.celery itself."
    ),
    "before_task_publish after_task_publish": f"Use task_enqueued of {signals.__name__}.",
    "task_prerun": f"Use task_started of {signals.__name__}.",
    "task_postrun task_success task_failure": f"Use task_finished of {signals.__name__}.",
    "task_received task_retry task_revoked task_rejected task_unknown": (
        "Use a TaskMiddleware: see the table of signals."
    ),
    "task_internal_error": "Use internal_error of django_dbqueue.signals.",
    "worker_init worker_before_create_process celeryd_after_setup": (
        "Use supervisor_started of django_dbqueue.signals."
    ),
    "worker_ready worker_process_init": "Use worker_started of django_dbqueue.signals.",
    "worker_process_shutdown": "Use worker_exited of django_dbqueue.signals.",
    "worker_shutting_down": "Use worker_stopping of django_dbqueue.signals.",
    "worker_shutdown": "Use worker_stopped of django_dbqueue.signals.",
    "beat_init beat_embedded_init": "Use scheduler_started of django_dbqueue.signals.",
    "setup_logging after_setup_logger after_setup_task_logger": "Use the setting LOGGING.",
    "celeryd_init import_modules": "Use AppConfig.ready().",
    "heartbeat_sent": "Ask runqueue --health-port.",
    "eventlet_pool_started eventlet_pool_preshutdown eventlet_pool_postshutdown "
    "eventlet_pool_apply": "Workers have threads and an event loop: there is no such pool.",
}
MISSING = {name: remedy for names, remedy in _NAMES.items() for name in names.split()}


def refuse_import(package: str, name: str) -> NoReturn:
    """Raise ImportError with the remedy for a name of Celery, and AttributeError for any other."""
    if remedy := MISSING.get(name):
        raise ImportError(
            f"cannot import name {name!r} from {package!r}, which has a subset of Celery. {remedy} "
            f"See {reference('from_celery', 'refused')}.",
            name=package,
        )
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
