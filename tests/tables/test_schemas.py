"""Several sets of tables in one PostgreSQL database: each backend in a schema of its own."""

from __future__ import annotations

import inspect
import threading
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import ProgrammingError, connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_dbqueue.models import Execution, Job
from django_dbqueue.runtime.worker.notify_listener import NotifyListener
from django_dbqueue.testing import drain

from .. import tasks
from ..conftest import LONG, log_of, until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="Only PostgreSQL has schemas."),
]
# The second must be quoted, and is as long as a name may be: 63 bytes.
NAMES = ("queue_a", "Bulk-€" + "x" * 55)
BACKEND = "django_dbqueue.backend.DatabaseBackend"


def sql(alias, statement, *values):
    with connections[alias].cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchall() if cursor.description else None


@pytest.fixture
def schemas(transactional_db, settings):
    """Make two backends, each with a database alias of one schema, and migrate them."""
    # A test may connect only to the databases that were in the settings when it began.
    patched = inspect.getclosurevars(BaseDatabaseWrapper.ensure_connection).nonlocals
    connect = patched["real_ensure_connection"]
    settings.TASKS = {**settings.TASKS, **{name: backend_in(name) for name in NAMES}}
    with mock.patch.object(BaseDatabaseWrapper, "ensure_connection", connect):
        try:
            for name in NAMES:
                sql("default", f'CREATE SCHEMA "{name}"')
                add_alias(name)
                call_command("migrate", "dbqueue", database=name, verbosity=0)
            yield NAMES
        finally:
            for name in NAMES:
                remove_alias(name)
                sql("default", f'DROP SCHEMA IF EXISTS "{name}" CASCADE')


def backend_in(name):
    return {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"database": name}}


def add_alias(name):
    base = connections.settings["default"]
    options = {**base["OPTIONS"], "options": f'-c search_path="{name}"'}
    connections.settings[name] = {**base, "OPTIONS": options}


def remove_alias(name):
    if name in connections.settings:
        connections[name].close()
        del connections[name], connections.settings[name]


def test_each_schema_has_its_own_tables_functions_and_migrations(schemas):
    for name in schemas:
        tables = {
            row[0]
            for row in sql(name, "SELECT tablename FROM pg_tables WHERE schemaname = %s", name)
        }
        functions = sql(
            name,
            "SELECT proname FROM pg_proc WHERE pronamespace = quote_ident(%s)::regnamespace",
            name,
        )

        assert {model._meta.db_table for model in (Job, Execution)} <= tables
        assert "django_migrations" in tables and "auth_user" not in tables
        assert ("dbqueue_enqueue",) in functions


def test_jobs_of_one_schema_are_not_seen_by_the_others(schemas):
    one, two = schemas
    tasks.add.using(backend=one).enqueue(1)
    tasks.add.using(backend=two).enqueue_many([(1,), (2,)])
    tasks.add.using(backend=two, key="k").enqueue(3)

    assert [Job.objects.using(name).count() for name in ("default", one, two)] == [0, 1, 3]
    assert (drain(two), drain(one), drain("default")) == (3, 1, 0)
    assert [Execution.objects.using(name).count() for name in ("default", one, two)] == [0, 1, 3]


def test_sql_function_writes_to_its_own_schema_whatever_the_caller_sees(schemas):
    one, two = schemas
    sql("default", f"SELECT \"{two}\".dbqueue_enqueue('tests.tasks.nothing')")
    sql(one, f"SELECT \"{two}\".dbqueue_enqueue('tests.tasks.nothing', key => 'k')")
    sql(one, "SELECT dbqueue_enqueue('tests.tasks.nothing')")

    assert [Job.objects.using(name).count() for name in ("default", one, two)] == [0, 1, 2]


def test_notify_wakes_only_the_workers_of_its_schema(schemas):
    one, two = schemas
    names = ("default", *schemas)
    heard: dict[str, list[str]] = {name: [] for name in names}
    ready = {name: threading.Event() for name in names}

    def hear(name, payload):
        heard[name].append(payload)
        return True

    listeners = [NotifyListener(name, partial(hear, name), ready[name].set) for name in names]

    def wait():
        for listener in listeners:
            listener.wait(0.05)

    with ExitStack() as stack:
        for listener in listeners:
            stack.callback(listener.close)
            listener.start()
        until(lambda: wait() or all(event.is_set() for event in ready.values()))
        tasks.nothing.using(backend=one, queue_name="from_python").enqueue()
        sql(two, "SELECT dbqueue_enqueue('tests.tasks.nothing', queue => 'from_sql')")
        tasks.nothing.using(queue_name="last").enqueue()

        until(lambda: wait() or all(heard.values()))
    assert heard == {one: ["from_python,0"], two: ["from_sql,0"], "default": ["last,0"]}


def test_zero_removes_one_schema_alone(schemas):
    one, two = schemas
    call_command("migrate", "dbqueue", "zero", database=one, verbosity=0)

    with pytest.raises(ProgrammingError):
        Job.objects.using(one).count()
    assert Job.objects.using(two).count() == 0


def test_schema_that_does_not_exist_is_an_error_of_migrate(schemas):
    add_alias("misspelt")
    try:
        with pytest.raises(Exception, match="no schema has been selected to create in"):
            call_command("migrate", "dbqueue", database="misspelt", verbosity=0)
    finally:
        remove_alias("misspelt")


def test_real_process_runs_the_jobs_of_its_schema(schemas, runqueue, tmp_path):
    one, two = schemas
    databases = {name: connections.settings[name]["OPTIONS"] for name in schemas}
    (tmp_path / "two_schemas.py").write_text(
        "from tests.settings import *\n"
        f"for name, options in {databases!r}.items():\n"
        "    DATABASES[name] = {**DATABASES['default'], 'OPTIONS': options}\n"
        f"TASKS |= { {name: backend_in(name) for name in schemas}!r}\n"
    )
    tasks.nothing.using(backend=one).enqueue()
    tasks.nothing.using(backend=two).enqueue_many([()] * 2)

    child = runqueue(
        *("--drain", "--backend", two),
        DJANGO_SETTINGS_MODULE="two_schemas",
        PYTHONPATH=f"{tmp_path}:{settings.BASE_DIR}",
    )

    assert child.wait(LONG) == 0, log_of(child)
    assert [Job.objects.using(name).ready().count() for name in schemas] == [1, 0]
