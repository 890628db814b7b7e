"""The ready-made tasks: call_command and run_sql."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import connection

from django_dbqueue import recurring_command
from django_dbqueue.contrib import output, rows
from django_dbqueue.contrib.tasks import call_command, run_sql
from django_dbqueue.core.options import Options
from django_dbqueue.exceptions import CommandNotAllowed, InvalidOption, SqlNotAllowed
from django_dbqueue.models import Execution, Job, RecurringTask
from django_dbqueue.models.expressions import Now
from django_dbqueue.runtime.scheduler import Scheduler
from django_dbqueue.testing import drain

from .conftest import LONG, is_mysql_itself, until
from .models import Run

pytestmark = pytest.mark.django_db


def outcome(result):
    drain()
    result.refresh()
    return result


@pytest.fixture
def allowed(backend, monkeypatch):
    """Allow SQL on the queue's own database."""
    monkeypatch.setitem(vars(backend), "config", backend.config.changed(allow_sql=["default"]))


@pytest.fixture
def allowed_in_workers(settings):
    """Allow SQL for workers on other threads too, each of which has its own backend."""
    default = settings.TASKS["default"]
    options = {**default["OPTIONS"], "allow_sql": ["default"]}
    settings.TASKS = {**settings.TASKS, "default": {**default, "OPTIONS": options}}


@pytest.fixture
def speak_allowed(backend, monkeypatch):
    monkeypatch.setitem(vars(backend), "config", backend.config.changed(allow_commands=["speak"]))


# call_command


def test_command_runs_with_arguments_and_its_output_is_stored(speak_allowed):
    result = outcome(call_command.enqueue("speak", "good", "morning", times=2, name="everybody"))

    assert result.return_value == "a warning\ngood morning everybody\ngood morning everybody\n"


def test_failing_command_fails_the_job_with_its_message(speak_allowed):
    result = outcome(call_command.enqueue("speak", fail=True))

    assert result.status == "FAILED"
    execution = Execution.objects.get()
    assert (execution.error_type, execution.message) == (
        "django.core.management.base.CommandError",
        "there was nothing to say",
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [("speek", "Did you mean 'speak'"), ("x", "manage.py help lists"), (None, "help lists")],
)
def test_unknown_command_is_refused_at_enqueue(name, hint):
    with pytest.raises(ValueError, match=rf"{name!r} is not a management command\. .*{hint}"):
        call_command.enqueue(name)

    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("args", "options", "why"),
    [
        ([], {"loudly": True}, "Unknown option(s) for speak command: loudly"),
        (["--loudly"], {}, "unrecognized arguments: --loudly"),
        (["--times", "often"], {}, "argument --times: invalid int value: 'often'"),
        (["--help"], {}, "'speak' with '--help' prints a text and ends"),
    ],
)
def test_command_arguments_are_checked_at_enqueue(speak_allowed, args, options, why):
    with pytest.raises(ValueError, match=rf"^call_command: .*{re.escape(why)}"):
        call_command.enqueue("speak", *args, **options)

    assert not Job.objects.exists()


def test_command_that_cannot_be_imported_is_refused_at_enqueue(speak_allowed, monkeypatch):
    monkeypatch.setitem(sys.modules, "tests.management.commands.speak", None)

    with pytest.raises(ValueError, match="'speak' cannot be loaded: ModuleNotFoundError: "):
        call_command.enqueue("speak")


def test_command_of_a_row_inserted_by_hand_fails_with_its_unknown_option(speak_allowed):
    Job.objects.create(
        task=call_command.module_path, queue="default", args=["speak"], kwargs={"loudly": True}
    )

    drain()

    assert "Unknown option(s) for speak command: loudly" in Execution.objects.get().message


def test_long_output_keeps_its_end(monkeypatch, speak_allowed):
    monkeypatch.setattr(output, "LONGEST", 100)

    text = outcome(call_command.enqueue("speak", "a" * 9, times=1000)).return_value

    assert re.fullmatch(r"\[…\]\n(aaaaaaaaa\n){10}", text)


def test_unstorable_characters_of_output_are_replaced():
    written = output.Output()
    written.write("a \x00 and a \ud800")

    assert written.text == "a  and a ?"


def test_command_is_refused_at_enqueue_unless_named():
    with pytest.raises(
        CommandNotAllowed,
        match=r"call_command may not run 'shell'.*\['default'\]\['OPTIONS'\]\['allow_commands'\]",
    ):
        call_command.enqueue("shell", command="print(1)")

    assert not Job.objects.exists()


def test_command_of_a_row_inserted_by_hand_is_refused_by_the_worker(speak_allowed):
    job = Job.objects.create(
        task=call_command.module_path,
        queue="default",
        args=["shell"],
        kwargs={"command": "from tests.models import Run; Run.objects.create(job='injected')"},
    )

    drain()

    job.refresh_from_db()
    assert job.state == Job.State.FAILED
    assert Execution.objects.get().error_type == "django_dbqueue.exceptions.CommandNotAllowed"
    assert not Run.objects.exists()


def test_declared_recurring_command_is_allowed_with_its_own_arguments_only():
    recurring_command("speak", "good", every=timedelta(hours=1), options={"name": "everybody"})

    assert (
        outcome(call_command.enqueue("speak", "good", name="everybody")).return_value
        == "a warning\ngood everybody\n"
    )
    for args, options in [
        ((), {}),
        (("bad",), {"name": "everybody"}),
        (("good",), {}),
        (("good",), {"name": "everybody", "times": 2}),
    ]:
        with pytest.raises(CommandNotAllowed):
            call_command.enqueue("speak", *args, **options)
        by_hand = Job.objects.create(
            task=call_command.module_path, queue="default", args=["speak", *args], kwargs=options
        )
        drain()
        by_hand.refresh_from_db()
        assert by_hand.state == Job.State.FAILED


def test_recurring_command_declared_for_another_backend_allows_nothing_here():
    recurring_command("speak", every=timedelta(hours=1), backend="other")

    with pytest.raises(CommandNotAllowed):
        call_command.enqueue("speak")


def test_row_of_a_recurring_command_inserted_by_hand_enqueues_nothing(backend):
    row = RecurringTask.objects.create(
        name="evil",
        command="shell",
        kwargs={"command": "1"},
        every=timedelta(hours=1),
        is_from_code=False,
    )
    RecurringTask.objects.update(next_run_at=Now())

    Scheduler(backend).turn(waiting=True)

    row.refresh_from_db()
    assert "call_command may not run 'shell'" in row.problem
    assert not Job.objects.exists()


# run_sql


def test_sql_is_refused_at_enqueue_unless_allowed():
    with pytest.raises(
        SqlNotAllowed, match=r"run_sql may not run on the database 'default'.*\['allow_sql'\]"
    ):
        run_sql.enqueue("SELECT 1")

    assert not Job.objects.exists()


def test_sql_is_refused_on_a_database_that_is_not_allowed(allowed):
    with pytest.raises(SqlNotAllowed, match="'other'"):
        run_sql.enqueue("SELECT 1", database="other")


def test_sql_of_a_row_inserted_by_hand_is_refused_by_the_worker():
    job = Job.objects.create(
        task=run_sql.module_path, queue="default", args=["DELETE FROM tests_run"]
    )
    Run.objects.create(job="stays")

    drain()

    job.refresh_from_db()
    assert job.state == Job.State.FAILED
    assert Execution.objects.get().error_type == "django_dbqueue.exceptions.SqlNotAllowed"
    assert Run.objects.exists()


def test_rows_are_stored_as_json(allowed):
    result = outcome(run_sql.enqueue("SELECT 1 AS one, %s AS name, NULL AS gone", ["50 %"]))

    assert result.return_value == [{"one": 1, "name": "50 %", "gone": None}]


def test_a_statement_without_parameters_may_have_percent_signs(allowed):
    assert outcome(run_sql.enqueue("SELECT '100%s' AS sure")).return_value == [{"sure": "100%s"}]


def test_parameters_may_have_names(allowed):
    assert outcome(run_sql.enqueue("SELECT %(a)s AS b", {"a": "c"})).return_value == [{"b": "c"}]


def test_statement_without_rows_returns_the_row_count(allowed):
    Run.objects.bulk_create([Run(job="a"), Run(job="b")])

    assert outcome(run_sql.enqueue("DELETE FROM tests_run")).return_value == 2
    assert not Run.objects.exists()


def test_keep_limits_the_stored_rows(allowed):
    Run.objects.bulk_create([Run(job=str(number)) for number in range(rows.KEPT + 5)])
    statement = "SELECT job FROM tests_run"

    assert len(outcome(run_sql.enqueue(statement)).return_value) == rows.KEPT
    assert len(outcome(run_sql.enqueue(statement, keep=3)).return_value) == 3
    assert outcome(run_sql.enqueue(statement, keep=0)).return_value == []


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        (["  "], {}, "must be a statement"),
        ([7], {}, "must be a statement, not 7"),
        (["SELECT 1", "x"], {}, "must be a list or a dict, not 'x'"),
        (["SELECT 1"], {"keep": -1}, "from 0 to 10,000, not -1"),
        (["SELECT 1"], {"keep": 10_001}, "from 0 to 10,000"),
        *(
            (["SELECT 1"], {"header": header}, rf"header must be true or false, not {header!r}\.")
            for header in ("yes", "", 0, 1, None)
        ),
    ],
)
def test_invalid_arguments_are_refused(allowed, args, kwargs, said):
    with pytest.raises(ValueError, match=said):
        run_sql.enqueue(*args, **kwargs)


def test_failing_statement_is_rolled_back_and_fails_the_job(allowed):
    result = outcome(
        run_sql.enqueue("INSERT INTO tests_run (job) SELECT 'x' UNION ALL SELECT nonsense")
    )

    assert result.status == "FAILED"
    assert not Run.objects.exists()


@pytest.mark.parametrize("header", [False, True])
def test_duplicate_column_names_are_refused(allowed, header):
    result = outcome(run_sql.enqueue("SELECT 1 AS id, 2 AS name, 3 AS id", header=header))

    assert result.status == "FAILED"
    assert "Several columns are named 'id'" in result.errors[0].traceback


several = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite takes one statement")


@pytest.mark.skipif(connection.vendor != "sqlite", reason="The others take several statements")
@pytest.mark.parametrize("second", ["SELECT 2 AS b", "DELETE FROM tests_run WHERE id = 0"])
@pytest.mark.parametrize("first", ["SELECT 1 AS a", "INSERT INTO tests_run (job) VALUES ('x')"])
def test_several_statements_are_refused_by_sqlite(allowed, first, second):
    result = outcome(run_sql.enqueue(f"{first}; {second}"))

    assert result.status == "FAILED"
    assert "takes one statement at a time" in result.errors[0].traceback
    assert "Enqueue a job for each" in result.errors[0].traceback
    assert not Run.objects.exists()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="A statement of PostgreSQL")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("copy", ["COPY tests_run TO STDOUT", "COPY tests_run (job) FROM STDIN"])
def test_copy_is_refused_with_a_remedy(allowed, copy):
    result = outcome(run_sql.enqueue(copy))

    assert result.status == "FAILED"
    assert "Write SELECT or INSERT" in result.errors[0].traceback


@pytest.mark.skipif(connection.vendor != "postgresql", reason="An option of PostgreSQL")
def test_several_statements_are_refused_with_server_side_binding(allowed, monkeypatch):
    from django.db.backends.postgresql.base import ServerBindingCursor

    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "server_side_binding", True)
    monkeypatch.setattr(connection.connection, "cursor_factory", ServerBindingCursor)

    result = outcome(run_sql.enqueue("SELECT %s AS a; SELECT %s AS b", [1, 2]))

    assert "Enqueue a job for each" in result.errors[0].traceback


@several
@pytest.mark.parametrize(
    ("sql", "returned"),
    [
        ("SELECT 1 AS a; SELECT 2 AS b", [{"b": 2}]),
        ("SELECT 1 AS a; SELECT 2 AS b;", [{"b": 2}]),
        ("INSERT INTO tests_run (job) VALUES ('x'); SELECT job FROM tests_run", [{"job": "x"}]),
        ("SELECT 1 AS a; DELETE FROM tests_run WHERE id = 0", 0),
        ("SELECT 1 AS a, 2 AS a; SELECT 3 AS b", [{"b": 3}]),
        ("SELECT ';' AS a; SELECT 'x;y -- z' AS b -- c; d", [{"b": "x;y -- z"}]),
    ],
)
def test_several_statements_return_the_result_of_the_last(allowed, sql, returned):
    assert outcome(run_sql.enqueue(sql)).return_value == returned


@several
def test_several_statements_may_have_parameters_and_a_header(allowed):
    result = outcome(
        run_sql.enqueue("SELECT %s AS a; SELECT %s AS b, 7 AS a", ["1;", "2;"], header=True)
    )

    assert [column["name"] for column in result.return_value["columns"]] == ["b", "a"]
    assert result.return_value["rows"] == [["2;", 7]]


@several
def test_failing_last_statement_rolls_back_the_first(allowed):
    result = outcome(
        run_sql.enqueue("INSERT INTO tests_run (job) VALUES ('x'); SELECT nonsense FROM tests_run")
    )

    assert result.status == "FAILED"
    assert not Run.objects.exists()


@several
def test_keep_limits_the_rows_of_the_last_statement(allowed):
    Run.objects.bulk_create([Run(job=str(number)) for number in range(5)])
    statement = "SELECT job FROM tests_run ORDER BY id"

    result = outcome(run_sql.enqueue(f"{statement}; {statement}", keep=2, header=True))

    assert result.return_value["rows"] == [["0"], ["1"]]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT ';' AS a;  \n",
        "-- first; comment\nSELECT ';' AS a",
        "SELECT ';' AS a -- it's; last",
        "SELECT ';' AS a; -- it's done",
        "SELECT ';' AS a; -- done;",
        "SELECT /* ; */ ';' AS a; /* done; */ -- really\n",
    ],
)
def test_comments_and_semicolons_end_no_statement(allowed, sql):
    assert outcome(run_sql.enqueue(sql)).return_value == [{"a": ";"}]


@pytest.mark.parametrize(
    ("sql", "sent"),
    [
        ("SELECT 1; # it's\n-- two\n/* three */", "SELECT 1;"),
        ("SELECT '; -- x'", "SELECT '; -- x'"),
        ("SELECT 1 -- x;", "SELECT 1 -- x;"),
        ("SELECT 'it\\'; -- x'", "SELECT 'it\\'; -- x'"),
        ("SELECT 'it''; -- x'; -- y", "SELECT 'it''; -- x';"),
        ('SELECT 1 AS "; # x"', 'SELECT 1 AS "; # x"'),
        ("SELECT 1; /*! SELECT 2 */", "SELECT 1; /*! SELECT 2 */"),
        ("SELECT 1; /*M! SELECT 2 */", "SELECT 1; /*M! SELECT 2 */"),
        ("SELECT 1; SELECT 2--1", "SELECT 1; SELECT 2--1"),
        ("SELECT 1;-- x\r\n", "SELECT 1;"),
        ("SELECT 1; -- x\n; SELECT 2", "SELECT 1; -- x\n; SELECT 2"),
        ("INSERT INTO a VALUES ('unclosed); -- x", "INSERT INTO a VALUES ('unclosed);"),
        ("-- only", "-- only"),
    ],
)
def test_only_comments_after_the_last_semicolon_are_removed(sql, sent):
    assert rows._without_last_comment(sql) == sent


# run_sql with a header


TYPES = {
    "postgresql": ("integer", "text", "numeric"),
    "mysql": ("LONG", "VAR_STRING", "NEWDECIMAL"),
    "sqlite": (None, None, None),
}[connection.vendor]


def test_header_has_names_and_types_and_rows_in_order(allowed):
    name = connection.ops.quote_name("The Number")
    statement = f"SELECT 1 AS z, 'é' AS a, 1.5 AS {name} UNION ALL SELECT 2, NULL, NULL"

    result = outcome(run_sql.enqueue(statement, header=True)).return_value

    assert [column["name"] for column in result["columns"]] == ["z", "a", "The Number"]
    types = tuple(column["type"] for column in result["columns"])
    assert types == (("LONGLONG", *TYPES[1:]) if is_mysql_itself() else TYPES)
    number = 1.5 if connection.vendor == "sqlite" else "1.5"
    assert result["rows"] == [[1, "é", number], [2, None, None]]


def test_header_without_rows_has_columns(allowed):
    (column,) = outcome(
        run_sql.enqueue("SELECT job FROM tests_run WHERE id = 0", header=True)
    ).return_value["columns"]

    assert column["name"] == "job"
    result = outcome(run_sql.enqueue("SELECT job FROM tests_run", keep=0, header=True))
    assert result.return_value == {"columns": [column], "rows": []}


def test_header_of_a_statement_without_rows_is_the_row_count(allowed):
    Run.objects.bulk_create([Run(job="a"), Run(job="b")])

    result = outcome(run_sql.enqueue("UPDATE tests_run SET job = job", header=True))

    assert result.return_value == 2


def test_header_of_a_column_without_a_name(allowed):
    (column,) = outcome(run_sql.enqueue("SELECT 1", header=True)).return_value["columns"]

    assert column["name"] == ("?column?" if connection.vendor == "postgresql" else "1")


def test_header_false_returns_dicts(allowed):
    assert outcome(run_sql.enqueue("SELECT 1 AS a", header=False)).return_value == [{"a": 1}]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="PostgreSQL's types")
def test_header_names_postgresql_types(allowed):
    columns = {
        "bigint": ("1::bigint", 1),
        "character varying": ("'a'::varchar(5)", "a"),
        "numeric": ("1.10::numeric(9, 2)", "1.10"),
        "date": ("'2026-01-02'::date", "2026-01-02"),
        "timestamp without time zone": ("'2026-01-02 03:04'::timestamp", "2026-01-02T03:04:00"),
        "bytea": (r"'\xff'::bytea", "ff"),
        "integer[]": ("ARRAY[1, NULL]", [1, None]),
        "jsonb": ("""'{"a": [1]}'::jsonb""", '{"a": [1]}'),
        "boolean": ("true", True),
        "pg_class": ("NULL::pg_class", None),
    }
    selected = ", ".join(f'{sql} AS "c{n}"' for n, (sql, _) in enumerate(columns.values()))

    result = outcome(run_sql.enqueue(f"SELECT {selected}", header=True)).return_value

    assert [column["type"] for column in result["columns"]] == list(columns)
    assert result["rows"] == [[value for _, value in columns.values()]]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="PostgreSQL's types")
def test_header_names_a_type_made_by_the_same_sql(allowed):
    result = outcome(
        run_sql.enqueue("CREATE TYPE mood AS ENUM ('sad'); SELECT 'sad'::mood AS now", header=True)
    )

    assert result.return_value == {
        "columns": [{"name": "now", "type": "mood"}],
        "rows": [["sad"]],
    }


@pytest.mark.skipif(connection.vendor != "postgresql", reason="PostgreSQL's empty SELECT")
def test_header_without_columns(allowed):
    result = outcome(run_sql.enqueue("SELECT FROM generate_series(1, 2)", header=True))

    assert result.return_value == {"columns": [], "rows": [[], []]}


@pytest.mark.skipif(connection.vendor != "mysql", reason="MariaDB's types")
def test_header_names_mariadb_types(allowed):
    result = outcome(
        run_sql.enqueue(
            "SELECT CAST(1 AS SIGNED) AS a, CAST('2026-01-02' AS DATE) AS b, x'ff' AS c, "
            "NULL AS d, 1e0 AS e, JSON_OBJECT('a', 1) AS f",
            header=True,
        )
    ).return_value

    types = [column["type"] for column in result["columns"]]
    assert types[1:5] == ["DATE", "VAR_STRING", "NULL", "DOUBLE"]
    assert result["rows"][0][:5] == [1, "2026-01-02", "ff", None, 1.0]


def test_header_of_ddl_is_a_number(allowed):
    result = outcome(run_sql.enqueue("CREATE TEMPORARY TABLE made (a INT)", header=True))

    assert type(result.return_value) is int


@pytest.mark.skipif(connection.vendor != "postgresql", reason="dbqueue_enqueue() is PostgreSQL's")
@pytest.mark.parametrize("header", ["true", '"yes"'])
def test_header_from_sql(allowed, header):
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT dbqueue_enqueue(%s, kwargs => %s)",
            [
                run_sql.module_path,
                f'{{"sql": "SELECT 1; SELECT 2::bigint AS id", "header": {header}}}',
            ],
        )
        (id,) = cursor.fetchone()

    drain()

    job = Job.objects.get(id=id)
    if header == "true":
        assert run_sql.get_result(str(id)).return_value == {
            "columns": [{"name": "id", "type": "bigint"}],
            "rows": [[2]],
        }
    else:
        assert job.state == Job.State.FAILED
        assert "header must be true or false, not 'yes'" in Execution.objects.get().message


def test_a_semicolon_may_end_a_statement(allowed):
    assert outcome(run_sql.enqueue("SELECT 1 AS a;")).return_value == [{"a": 1}]


def test_values_without_a_json_type_are_text():
    from datetime import date, datetime, timedelta, timezone
    from decimal import Decimal
    from uuid import UUID

    assert [
        rows.as_json(value)
        for value in (
            datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone.utc),
            date(2026, 1, 2),
            timedelta(hours=1),
            Decimal("1.10"),
            UUID(int=1),
            b"\x01\xff",
            memoryview(b"\x02"),
            float("inf"),
            [1, Decimal(2)],
            {"a": date(2026, 1, 2)},
            "a\x00b",
        )
    ] == [
        "2026-01-02T03:04:05.678901+00:00",
        "2026-01-02",
        "P0DT01H00M00S",
        "1.10",
        "00000000-0000-0000-0000-000000000001",
        "01ff",
        "02",
        "inf",
        [1, "2"],
        {"a": "2026-01-02"},
        "ab",
    ]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="PostgreSQL's types")
def test_postgresql_types_can_be_stored(allowed):
    statement = """SELECT now() AS t, 1.5::numeric AS n, gen_random_uuid() AS u, '{"a": 1}'::jsonb AS j, '\\x01'::bytea AS b,
        ARRAY[1, 2] AS a, int4range(1, 5) AS r, '10.0.0.1'::inet AS i, interval '1 day' AS d, 'nan'::float8 AS f"""

    (row,) = outcome(run_sql.enqueue(statement)).return_value

    assert (row["n"], row["b"], row["a"], row["i"], row["f"]) == (
        "1.5",
        "01",
        [1, 2],
        "10.0.0.1",
        "nan",
    )
    assert row["r"] == "[1, 5)"


def test_allow_sql_is_a_list_of_names():
    assert Options.from_settings({"allow_sql": "default, other"}).allow_sql == ("default", "other")
    with pytest.raises(InvalidOption, match="allow_sql=True is not a list of names"):
        Options.from_settings({"allow_sql": True})


# In every project


@pytest.mark.parametrize(
    ("tasks", "queue"),
    [
        ('{"default": {"BACKEND": "django_dbqueue.backend.DatabaseBackend"}}', "default"),
        (
            '{"default": {"BACKEND": "django_dbqueue.backend.DatabaseBackend", "QUEUES": []}}',
            "default",
        ),
        (
            '{"default": {"BACKEND": "django_dbqueue.backend.DatabaseBackend", "QUEUES": ["mail", "reports"]}}',
            "mail",
        ),
        (
            '{"jobs": {"BACKEND": "django_dbqueue.backend.DatabaseBackend", "QUEUES": ["mail"]}}',
            "mail",
        ),
    ],
)
def test_module_imports_with_any_backends_and_queues(tasks, queue):
    code = (
        "import json, django; from django.conf import settings; "
        f"settings.configure(TASKS=json.loads({tasks!r}), INSTALLED_APPS=['django_dbqueue'], DATABASES={{'default': "
        "{'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}}, USE_TZ=True); "
        "django.setup(); from django_dbqueue.contrib.tasks import call_command; print(call_command.queue_name)"
    )

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (ran.stdout, ran.stderr) == (f"{queue}\n", "")


def test_worker_runs_call_command(runqueue, speak_allowed):
    result = call_command.enqueue("speak", "hello")

    runqueue("--embedded", "--drain", DBQUEUE_OPTIONS='{"allow_commands": ["speak"]}').wait(LONG)

    result.refresh()
    assert result.return_value == "a warning\nhello\n"


@pytest.mark.skipif(connection.vendor != "postgresql", reason="Elsewhere its process is ended")
def test_statement_past_its_timeout_is_cancelled(runqueue, backend, monkeypatch):
    options = backend.config.changed(allow_sql=["default"], timeout=1.0)
    monkeypatch.setitem(vars(backend), "config", options)
    monkeypatch.setitem(vars(backend), "options_of", options.of)
    result = run_sql.enqueue("SELECT pg_sleep(60)")

    runqueue("--embedded", "--drain", DBQUEUE_OPTIONS='{"allow_sql": ["default"]}')
    until(lambda: Execution.objects.exists())

    execution = Execution.objects.get(job=result.id)
    assert execution.outcome == Execution.Outcome.TIMED_OUT
    assert (execution.finished_at - execution.started_at).total_seconds() < 30


ENDS_TRANSACTION = [
    "INSERT INTO tests_run (name) VALUES ('a'); COMMIT",
    "SELECT 1; /* now */ rollback",
    "BEGIN; SELECT 1",
    "start  transaction",
    "SELECT 1;\nSAVEPOINT a",
    "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    "SET autocommit = 0",
    "set @@session.autocommit=1",
    "SELECT 1; LOCK TABLES tests_run WRITE",
    "lock table tests_run as r read local, tests_item write",
]
ENDS_NO_TRANSACTION = [
    "SELECT 'a; COMMIT'",
    "SELECT 1 -- ; commit",
    "SELECT 'it\\'s; COMMIT'",
    "SELECT $a$; COMMIT$a$",
    'SELECT 1 AS "; commit"',
    "CREATE FUNCTION f() RETURNS int LANGUAGE sql BEGIN ATOMIC SELECT 1; END",
    "CREATE PROCEDURE p() BEGIN SELECT 1; END",
    "DO $$ BEGIN PERFORM 1; END $$",
    "LOCK TABLE tests_run IN ACCESS EXCLUSIVE MODE",
    "SELECT 1 AS autocommit",
]


@pytest.mark.django_db(transaction=True)
def test_definition_of_a_table_succeeds(allowed):
    """On MariaDB and MySQL it commits, and the job failed though the table was there."""
    statements = ["CREATE TABLE tests_defined (i int)", "DROP TABLE tests_defined"]
    results = [run_sql.enqueue(each) for each in statements]
    drain()
    for result in results:
        result.refresh()
        assert (result.status, result.return_value) in [("SUCCESSFUL", 0), ("SUCCESSFUL", -1)]


@pytest.mark.django_db(transaction=True)
def test_job_that_fails_after_the_definition_of_a_table_is_failed(allowed):
    if connection.vendor == "sqlite":
        pytest.skip("SQLite takes one statement at a time.")
    result = run_sql.enqueue("CREATE TABLE tests_defined (i int); SELECT * FROM tests_nowhere")
    drain()
    result.refresh()
    assert result.status == "FAILED"
    assert "tests_nowhere" in Execution.objects.get().message
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS tests_defined")


@pytest.mark.parametrize("sql", ENDS_TRANSACTION)
def test_sql_that_ends_the_transaction_of_its_job_is_refused(allowed, sql):
    """A COMMIT kept the effects of jobs that then failed, again with each retry."""
    with pytest.raises(ValueError, match=r"must not have .* are one transaction. Leave it out"):
        run_sql.enqueue(sql)


@pytest.mark.parametrize("sql", ENDS_NO_TRANSACTION)
def test_words_of_transactions_elsewhere_are_accepted(sql):
    rows.check_transaction(sql)


@pytest.mark.parametrize("database", ["nope", None, 5])
def test_unknown_database_is_named_with_the_known_ones(allowed, database):
    with pytest.raises(ValueError, match=rf"{database!r} is no database. DATABASES has default"):
        run_sql.enqueue("SELECT 1", database=database)


CHANGES = {
    "postgresql": ("SET work_mem = '123MB'", "SHOW work_mem"),
    "mysql": ("SET SESSION sql_mode = 'ANSI'", "SELECT @@SESSION.sql_mode"),
    "sqlite": ("PRAGMA cache_size = 123", "PRAGMA cache_size"),
}


@pytest.mark.django_db(transaction=True)
def test_session_that_a_statement_changes_is_not_that_of_later_jobs(allowed_in_workers, worker):
    """A read-only session made all jobs of its thread fail; a role was kept for others."""
    change, question = CHANGES[connection.vendor]
    ask = run_sql.enqueue(question)
    worker(threads=1)
    before = ask.wait(LONG).return_value

    run_sql.enqueue(change).wait(LONG)

    assert run_sql.enqueue(question).wait(LONG).return_value == before


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="Of PostgreSQL's sessions")
@pytest.mark.parametrize(
    "sql",
    [
        "SET default_transaction_read_only = on",
        "SET LOCAL search_path = pg_catalog; SELECT 1",
        "SET LOCAL ROLE pg_monitor; SELECT 1",
    ],
)
def test_job_ends_whatever_its_statement_sets(allowed_in_workers, worker, sql):
    worker(threads=1)

    assert run_sql.enqueue(sql).wait(LONG).status == "SUCCESSFUL"
    assert run_sql.enqueue("SELECT 1 AS a").wait(LONG).return_value == [{"a": 1}]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="Values of PostgreSQL")
@pytest.mark.parametrize(
    ("sql", "value"),
    [
        ("'infinity'::timestamptz", "infinity"),
        ("'-infinity'::date", "-infinity"),
        ("'20000-01-01'::date", "20000-01-01"),
        ("'24:00'::time", "24:00:00"),
        ("'1 year 2 mons'::interval", "1 year 2 mons"),
        ("'10000000 years'::interval", "10000000 years"),
        ("'90 minutes'::interval", "P0DT01H30M00S"),
        ("'2026-01-02'::date", "2026-01-02"),
        ("""'{"a": 1}'::json""", '{"a": 1}'),
        ("""'{"a": 1}'::jsonb""", '{"a": 1}'),
    ],
)
def test_values_that_python_cannot_hold_are_text(allowed, sql, value):
    assert outcome(run_sql.enqueue(f"SELECT {sql} AS a")).return_value == [{"a": value}]


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="PostgreSQL cancels statements")
@pytest.mark.parametrize("how", ["stop", "timeout"])
def test_statement_of_a_stopped_job_ends_on_the_server(allowed_in_workers, worker, how):
    """It went on without its job, and kept its locks."""
    worker(threads=1)
    at = run_sql.using(timeout=1.0) if how == "timeout" else run_sql
    result = at.enqueue(
        "SELECT pg_sleep(0.9);" * 100 if how == "timeout" else "SELECT pg_sleep(90)"
    )
    until(lambda: sleeping())

    Job.objects.all().stop() if how == "stop" else None

    assert result.wait(LONG).is_finished
    until(lambda: not sleeping())
    assert Execution.objects.get().outcome == {"stop": "discarded", "timeout": "timed_out"}[how]


def sleeping():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE state = 'active' AND query LIKE 'SELECT pg_sleep(%%' AND datname = current_database()",
            (),
        )
        return cursor.fetchone()[0]


def test_backend_without_allow_commands_refuses_commands():
    with pytest.raises(CommandNotAllowed, match=r"TASKS\['dummy'\]"):
        call_command.func.check_call(SimpleNamespace(alias="dummy"), "speak")


def test_backend_without_allow_sql_refuses_sql():
    with pytest.raises(SqlNotAllowed, match=r"TASKS\['dummy'\]"):
        run_sql.func.check_call(SimpleNamespace(alias="dummy"), "SELECT 1")
