"""System checks of the project around the queue. A backend checks its own OPTIONS."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module

from django.conf import settings
from django.core import mail, management
from django.core.checks import CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.inspect import func_accepts_kwargs
from django.utils.module_loading import import_string

from . import limits
from .backend import DatabaseBackend
from .compat import task_backends
from .core.alert_targets import ADMINS
from .core.documentation import with_reference
from .core.options import Options
from .exceptions import InvalidOption, InvalidSchedule, InvalidTaskPath
from .limits import Limit, Rate
from .recurrence.declare import Declared, declared
from .registry import load, modules_with_tasks, tasks_in

SUPPORTED = ("postgresql", "mysql", "sqlite")
NOT_IMMEDIATE = "SQLite without immediate transactions fails with 'database is locked' under load."


@register("dbqueue")
def check_databases(app_configs: object = None, **kwargs: object) -> Iterator[CheckMessage]:
    """Check that each backend's database can hold a queue."""
    return map(with_reference, _problems_of_backends())


def _problems_of_backends() -> Iterator[CheckMessage]:
    served: dict[tuple[str, str], str] = {}
    for alias in task_backends:
        backend = task_backends[alias]
        if isinstance(backend, DatabaseBackend):
            try:
                yield from _check_database(backend)
                yield from _check_queues(backend, served)
                yield from _check_commands(backend)
                yield from _check_sql(backend)
                yield from _check_receivers(backend)
                yield from _check_middleware(backend)
                yield from _check_alerts(backend)
            except (InvalidOption, TypeError):
                continue  # The backend's own check reports it.


def _check_queues(
    backend: DatabaseBackend, served: dict[tuple[str, str], str]
) -> Iterator[CheckMessage]:
    """Warn if two backends on one database have a queue in common.

    Each backend would run the other's jobs with its own options.
    """
    for queue in backend.queues or {"*"}:
        for (database, other), alias in served.items():
            if database == backend.database and (queue == other or "*" in (queue, other)):
                yield Warning(
                    f"TASKS[{alias!r}] and TASKS[{backend.alias!r}] share the queue {queue!r} of "
                    "one database: each runs the other's jobs with its own options.",
                    hint="Give each backend its own QUEUES.",
                    id="dbqueue.W002",
                )
                return
    served.update({(backend.database, queue): backend.alias for queue in backend.queues or {"*"}})


def _check_commands(backend: DatabaseBackend) -> Iterator[CheckMessage]:
    for name in backend.config.allow_commands:
        if name not in management.get_commands():
            yield Error(
                f"TASKS[{backend.alias!r}]['OPTIONS']['allow_commands']: {name!r} is not a "
                "management command.",
                hint="manage.py help lists the commands.",
                id="dbqueue.E007",
            )


def _check_sql(backend: DatabaseBackend) -> Iterator[CheckMessage]:
    for name in backend.config.allow_sql:
        if name not in connections.settings:
            yield Error(
                f"TASKS[{backend.alias!r}]['OPTIONS']['allow_sql']: {name!r} is no database.",
                hint=f"DATABASES has {', '.join(connections.settings)}.",
                id="dbqueue.E010",
            )


def _check_receivers(backend: DatabaseBackend) -> Iterator[CheckMessage]:
    for signal, paths in backend.config.receivers.items():
        for path in paths:
            where = f"TASKS[{backend.alias!r}]['OPTIONS']['receivers'][{signal!r}]: {path!r}"
            try:
                receiver = import_string(path)
            except Exception as error:
                said = f"{where} cannot be imported: {type(error).__name__}: {error}"
                yield Error(said, hint="Correct the path, or fix its module.", id="dbqueue.E009")
                continue
            if not callable(receiver) or not func_accepts_kwargs(receiver):
                yield Error(
                    f"{where} is not a function that accepts **kwargs.",
                    hint=f"Give it the signature def {path.rpartition('.')[2]}(sender, **kwargs).",
                    id="dbqueue.E009",
                )


def _check_middleware(backend: DatabaseBackend) -> Iterator[CheckMessage]:
    try:
        _ = backend.middleware
    except Exception as error:
        yield Error(
            f"TASKS[{backend.alias!r}]['OPTIONS']['middleware'] cannot be used: "
            f"{type(error).__name__}: {error}",
            hint="Correct the path, or fix its module.",
            id="dbqueue.E011",
        )


def _check_alerts(backend: DatabaseBackend) -> Iterator[CheckMessage]:
    for place, target in enumerate(backend.config.alert_targets):
        where = f"TASKS[{backend.alias!r}]['OPTIONS']['alerts'][{place}]"
        if target.way == "function":
            where += f": {target.to[0]!r}"
            try:
                is_function = callable(import_string(target.to[0]))
            except Exception as error:
                said = f"{where} cannot be imported: {type(error).__name__}: {error}"
                yield Error(said, hint="Correct the path, or fix its module.", id="dbqueue.E012")
                continue
            if not is_function:
                yield Error(
                    f"{where} is not a function.",
                    hint=f"Give it the signature def {target.to[0].rpartition('.')[2]}(alerts).",
                    id="dbqueue.E012",
                )
        if target.to == (ADMINS,) and not settings.ADMINS:
            yield Warning(
                f"{where}: the setting ADMINS is empty, so no mail is sent.",
                hint="Set ADMINS, or give addresses: {'mail': ['ops@example.com']}.",
                id="dbqueue.W006",
            )


def _check_database(backend: DatabaseBackend) -> Iterator[CheckMessage]:
    name = f"TASKS[{backend.alias!r}]"
    if backend.database not in connections:
        known = ", ".join(connections)
        yield Error(
            f"{name} names the unknown database {backend.database!r}. Choose from {known}.",
            id="dbqueue.E002",
        )
        return
    connection = connections[backend.database]
    if connection.vendor not in SUPPORTED:
        yield Error(f"{name}: {connection.display_name} is not supported.", id="dbqueue.E003")
    if connection.vendor != "postgresql" and (
        not settings.USE_TZ or connection.timezone_name != "UTC"
    ):
        yield Error(
            f"{name}: on {connection.display_name}, all processes agree on a time only in UTC.",
            hint=f"Set USE_TZ = True, and no TIME_ZONE in DATABASES[{backend.database!r}]: "
            "both are Django's defaults.",
            id="dbqueue.E004",
        )
    if not connection.settings_dict["AUTOCOMMIT"]:
        yield Error(
            f"{name}: DATABASES[{backend.database!r}]['AUTOCOMMIT'] is False. Workers would commit "
            "none of the queue's statements.",
            hint="Leave it out, as Django advises, or name an alias without it in "
            "OPTIONS['database'].",
            id="dbqueue.E013",
        )
    if connection.vendor == "sqlite" and not is_immediate(connection):
        yield Warning(
            f"{name}: {NOT_IMMEDIATE}",
            hint=f"Set {options_for_sqlite(backend.database)}.",
            id="dbqueue.W001",
        )


def is_immediate(connection: BaseDatabaseWrapper) -> bool:
    return bool(connection.settings_dict["OPTIONS"].get("transaction_mode") == "IMMEDIATE")


def options_for_sqlite(alias: str) -> str:
    return (
        f"DATABASES[{alias!r}]['OPTIONS'] = "
        "{'transaction_mode': 'IMMEDIATE', 'init_command': 'PRAGMA journal_mode=WAL'}"
    )


# runqueue does not run this check: a supervisor imports no tasks.
@register("dbqueue_recurring")
def check_recurring_tasks(app_configs: object = None, **kwargs: object) -> Iterator[CheckMessage]:
    """Check task modules, the recurring tasks that they declare, and shared limits.

    The modules can be imported, every declared recurring task can recur, tasks that share a limit
    agree on it, queued mail has a mailer that sends it, and no setting of Celery promises that jobs
    run at once.
    """
    return map(with_reference, _problems_of_tasks())


def _problems_of_tasks() -> Iterator[CheckMessage]:
    for name in dict.fromkeys(modules_with_tasks(_task_modules())):
        try:
            import_module(name)
        except InvalidSchedule as error:
            yield Error(f"{name}: {error}", id="dbqueue.E006")
        except Exception as error:
            configs = list(_configs())
            if not (configs and all(each.allows_import_error(name) for each in configs)):
                yield Error(
                    f"{name} holds tasks and cannot be imported: {type(error).__name__}: {error}",
                    hint="Fix or remove the module: runqueue does not start with it. To run the "
                    f"other tasks without it, set OPTIONS['allow_import_errors'] = [{name!r}].",
                    id="dbqueue.E008",
                )
    any_runs_them = any(
        isinstance(task_backends[alias], DatabaseBackend) for alias in task_backends
    )
    yield from _check_names_in_settings()
    in_settings = [one for backend in _backends() for one in backend.recurring]
    for one in (*declared().values(), *in_settings):
        try:
            alias = _backend_of(one)
            if alias in task_backends.settings and not isinstance(
                task_backends[alias], DatabaseBackend
            ):
                said = (
                    f"{one.name!r} never runs: its backend TASKS[{alias!r}] is not a "
                    "DatabaseBackend."
                )
                hint = "Set backend= of @task or recurring_command() to a DatabaseBackend."
                # Without any DatabaseBackend, as in tests, no task is meant to recur.
                yield (
                    Error(said, hint, id="dbqueue.E006")
                    if any_runs_them
                    else Warning(said, hint, id="dbqueue.W004")
                )
                continue
            one.resolved()
        except InvalidSchedule as error:
            yield Error(str(error), id="dbqueue.E006")
    yield from _check_groups()
    yield from _check_mailers()
    if any_runs_them:
        yield from _check_eager()


def _check_names_in_settings() -> Iterator[CheckMessage]:
    """Check that no two backends on one database declare one row."""
    aliases: dict[tuple[str, str], str] = {}
    for backend in _backends():
        for one in backend.recurring:
            other = aliases.setdefault((backend.database, one.name), backend.alias)
            if other != backend.alias:
                yield Error(
                    f"TASKS[{other!r}] and TASKS[{backend.alias!r}] both declare {one.name!r} in "
                    "OPTIONS['recurring'], in one database. Rename one of them.",
                    id="dbqueue.E006",
                )


def _check_groups() -> Iterator[CheckMessage]:
    """Warn if tasks that share a limit by its group give different numbers.

    Of different numbers, the smallest among the existing jobs applies.
    """
    first: dict[tuple[object, ...], tuple[Limit | Rate, str]] = {}
    databases = {backend.alias: backend.database for backend in _backends()}
    for path, task in tasks_in(_task_modules()).items():
        for each in limits.of_task(task):
            if each.group is not None and task.backend in databases:
                # A group has separate semaphores for limits with a key and without one.
                shared = databases[task.backend], type(each), each.group, each.key is None
                other, other_path = first.setdefault(shared, (each, path))
                if other.numbers != each.numbers:
                    yield Warning(
                        f"{other_path} and {path} share the group {each.group!r} with different "
                        f"limits: {other.described()} and {each.described()}. While jobs of both "
                        "exist, the stricter limit applies.",
                        hint="Give both the same limit, or each its own group.",
                        id="dbqueue.W005",
                    )


def _check_mailers() -> Iterator[CheckMessage]:
    """Check that each mailer that enqueues messages names one that sends them."""
    for alias, mailer in getattr(settings, "MAILERS", {}).items():
        try:
            backend = import_string(mailer["BACKEND"])
        except Exception:  # Django's own check reports it.
            continue
        # Its module is loaded by the settings alone: it has a task.
        module = sys.modules.get("django_dbqueue.contrib.mail")
        if module and isinstance(backend, type) and issubclass(backend, module.EmailBackend):
            try:
                _ = mail.mailers[alias]  # type: ignore[attr-defined, unused-ignore]
            except ImproperlyConfigured as error:
                yield Error(str(error), id="dbqueue.E014")


def _check_eager() -> Iterator[CheckMessage]:
    """Warn if Celery's tasks are to run at once, and some are tasks of this queue."""
    if "django_dbqueue.contrib.celery" in sys.modules and (where := _eager_by()):
        yield Warning(
            f"{where} is true, and does not apply to tasks of django_dbqueue.contrib.celery: "
            "their jobs are stored, and do not run at once.",
            hint="In tests, run them by drain() of django_dbqueue.testing, or set TASKS to "
            "Django's ImmediateBackend. If tasks of Celery itself need the setting, add "
            "'dbqueue.W007' to SILENCED_SYSTEM_CHECKS.",
            id="dbqueue.W007",
        )


def _eager_by() -> str:
    """Return the setting that lets Celery run tasks at once; "" if none does."""
    for name in ("CELERY_TASK_ALWAYS_EAGER", "CELERY_ALWAYS_EAGER"):
        if getattr(settings, name, False):
            return name
    # Celery's current_app would make an app if there is none.
    apps_of = getattr(sys.modules.get("celery._state"), "_get_active_apps", tuple)
    for app in list(apps_of()):
        try:
            if app.conf.task_always_eager:
                return f"task_always_eager of the Celery app {app.main!r}"
        except Exception:  # An invalid configuration is Celery's to report.
            continue
    return ""


def _backend_of(one: Declared) -> str | None:
    try:
        return one.backend or load(one.call.task).backend
    except InvalidTaskPath:
        return None


def _task_modules() -> Iterator[str]:
    return (name for config in _configs() for name in config.task_modules)


def _configs() -> Iterator[Options]:
    return (backend.config for backend in _backends())


def _backends() -> Iterator[DatabaseBackend]:
    """Yield the backends whose OPTIONS can be read.

    Each other backend reports the reason in its own check.
    """
    for alias in task_backends:
        backend = task_backends[alias]
        if isinstance(backend, DatabaseBackend):
            try:
                _ = backend.config
            except (InvalidOption, TypeError):
                continue
            yield backend
