"""Ready-made tasks that every worker knows: a management command and a SQL statement."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from django.core import management
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from ..compat import (
    BaseTaskBackend,
    task_backends,
)
from ..core import serialization
from ..core.serialization import Json
from ..exceptions import CommandNotAllowed, SqlNotAllowed
from ..recurrence.declare import declared
from ..runtime.connections import close_after_job
from ..tasks import task
from . import rows
from .output import Output
from .usual_place import usual_place

if TYPE_CHECKING:
    from ..context import JobContext

F = TypeVar("F", bound=Callable[..., object])

MOST_ROWS = 10_000


def _checked_by(check: Callable[..., None]) -> Callable[[F], F]:
    """Have ``check`` called with the backend and the arguments before a job is written."""

    def decorate(function: F) -> F:
        function.check_call = check  # type: ignore[attr-defined]
        return function

    return decorate


def _check_command(
    backend: BaseTaskBackend, name: object, /, *args: object, **options: object
) -> None:
    _check_allowed(backend, name, *args, **options)
    _check_arguments(str(name), args, options)


def _check_allowed(
    backend: BaseTaskBackend, name: object, /, *args: object, **options: object
) -> None:
    known = management.get_commands()
    if not isinstance(name, str) or name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "manage.py help lists the commands."
        raise ValueError(f"call_command: {name!r} is not a management command. {hint}")
    config = getattr(backend, "config", None)
    if config is None or (
        name not in config.allow_commands and not _is_declared(backend, name, args, options)
    ):
        raise CommandNotAllowed(
            f"call_command may not run {name!r}. Add it to "
            f"TASKS[{backend.alias!r}]['OPTIONS']['allow_commands'], or declare it with "
            "recurring_command() or OPTIONS['recurring'], which allow only these arguments."
        )


def _check_arguments(name: str, args: Sequence[object], options: Mapping[str, object]) -> None:
    """Raise ValueError for arguments that the command's parser refuses. Nothing is run."""
    try:
        command = management.load_command_class(management.get_commands()[name], name)
    except Exception as error:
        raise ValueError(
            f"call_command: {name!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    command.execute = _run_nothing  # type: ignore[method-assign]
    try:
        management.call_command(command, *args, **options)
    except (management.CommandError, TypeError) as error:
        said = str(error).removeprefix("Error: ")
        raise ValueError(f"call_command: arguments of {name!r}: {said}") from None
    except SystemExit:
        raise ValueError(
            f"call_command: {name!r} with {', '.join(map(repr, args))} prints a text and ends. "
            "Leave --help and --version out."
        ) from None


def _run_nothing(*args: object, **options: object) -> None:
    pass


def _is_declared(backend: BaseTaskBackend, *call: object) -> bool:
    """Return whether the code or the settings declare exactly this call as a recurring command.

    Table rows cannot add to the declarations.
    """
    given = serialization.to_json(call)
    return any(
        one.backend == backend.alias
        and given == serialization.to_json((one.call.command, one.call.args, one.call.kwargs))
        for one in (*declared().values(), *getattr(backend, "recurring", ()))
        if one.call.command
    )


def _check_sql(
    backend: BaseTaskBackend,
    sql: object,
    parameters: object = None,
    database: str = DEFAULT_DB_ALIAS,
    keep: object = rows.KEPT,
    header: object = False,
) -> None:
    config = getattr(backend, "config", None)
    if not isinstance(database, str) or database not in connections.settings:
        raise ValueError(
            f"run_sql: {database!r} is no database. "
            f"DATABASES has {', '.join(connections.settings)}."
        )
    if config is None or database not in config.allow_sql:
        raise SqlNotAllowed(
            f"run_sql may not run on the database {database!r}. Add it to "
            f"TASKS[{backend.alias!r}]['OPTIONS']['allow_sql']."
        )
    if not isinstance(sql, str) or not sql.strip():
        raise ValueError(f"run_sql: sql must be a statement, not {sql!r}.")
    rows.check_transaction(sql)
    if not isinstance(parameters, list | tuple | dict | None):
        raise ValueError(f"run_sql: parameters must be a list or a dict, not {parameters!r}.")
    if type(keep) is not int or not 0 <= keep <= MOST_ROWS:
        raise ValueError(
            f"run_sql: keep must be a number of rows from 0 to {MOST_ROWS:,}, not {keep!r}."
        )
    if type(header) is not bool:
        raise ValueError(f"run_sql: header must be true or false, not {header!r}.")


@task(takes_context=True, **usual_place())
@_checked_by(_check_command)
def call_command(context: JobContext, name: str, /, *args: object, **options: object) -> str:
    """Run a management command with the arguments of Django's ``call_command``.

    Returns its output on ``stdout`` and ``stderr``; of a long one, the last 20,000 characters.
    ``enqueue()`` raises ValueError for an unknown command and for arguments that it does not take.
    Raises CommandNotAllowed for a command that ``OPTIONS["allow_commands"]`` does not name and that
    neither ``recurring_command`` nor ``OPTIONS["recurring"]`` declares with the same arguments. A
    CommandError fails the job.
    """
    _check_allowed(task_backends[context.task_result.backend], name, *args, **options)
    output = Output()
    management.call_command(name, *args, **{**options, "stdout": output, "stderr": output})
    return output.text


@task(takes_context=True, atomic=True, **usual_place())
@_checked_by(_check_sql)
def run_sql(
    context: JobContext,
    sql: str,
    parameters: list[Any] | dict[str, Any] | None = None,
    database: str = DEFAULT_DB_ALIAS,
    keep: int = rows.KEPT,
    header: bool = False,
) -> Json:
    """Run SQL in a transaction that is committed on success.

    sql: a statement, or on PostgreSQL, MariaDB and MySQL several, separated by semicolons. The
        result is the last one's.
    parameters: a list, or a dict for ``%(name)s``.
    database: the alias in ``DATABASES``.
    keep: the largest number of rows to return, from 0 to 10,000.
    header: whether to return the columns too, with their names and types.

    Returns the rows as dicts of JSON values. With ``header``, returns ``{"columns": [{"name": "id",
    "type": "bigint"}], "rows": [[1]]}``, in the order of the statement. For a statement that
    returns no rows, returns the number of changed rows. Raises SqlNotAllowed for a database that
    ``OPTIONS["allow_sql"]`` does not name, and ValueError for other arguments, statements that
    begin or end a transaction, several statements on SQLite, or two columns of one name. On
    PostgreSQL, the statements are cancelled after the job's timeout.
    """
    _check_sql(task_backends[context.task_result.backend], sql, parameters, database, keep, header)
    # What it sets must not hold for later jobs.
    for alias in {database, context.job._state.db or database}:
        close_after_job(alias)
    # DDL on MariaDB and MySQL commits, and then there is no savepoint to release.
    with transaction.atomic(using=database, savepoint=False):
        return rows.run(sql, parameters, database, keep, header, context.job.timeout)
