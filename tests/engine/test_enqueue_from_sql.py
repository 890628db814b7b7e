"""``dbqueue_enqueue``: from psycopg, as another language would, and from a trigger. PostgreSQL alone has it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from uuid import RFC_4122, UUID

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from django_dbqueue.models import Job
from django_dbqueue.models.expressions import after
from django_dbqueue.testing import drain

from .. import direct, tasks
from ..conftest import log_of, until
from ..models import Run

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(
        connection.vendor != "postgresql", reason="PostgreSQL alone has the function"
    ),
]
State = Job.State
ADD = "tests.tasks.add"


@pytest.fixture
def stranger(transactional_db):
    """A connection that knows nothing of Django."""
    psycopg = pytest.importorskip("psycopg")
    given = connection.get_connection_params()
    names = ("host", "port", "user", "password", "dbname")
    with psycopg.connect(
        **{name: given[name] for name in names if name in given}, autocommit=True
    ) as other:
        yield other


@pytest.fixture
def enqueue(stranger):
    """Call the function with arguments by name."""

    def enqueue(task=ADD, **given):
        from psycopg.types.json import Jsonb

        named = {
            name: Jsonb(value) if name in ("args", "kwargs") else value
            for name, value in given.items()
        }
        extra = "".join(f", {name} => %({name})s" for name in named)
        row = stranger.execute(
            f"SELECT dbqueue_enqueue(%(task)s{extra})", {"task": task, **named}
        ).fetchone()
        return row[0]

    return enqueue


def test_a_job_is_as_python_would_have_written_it(enqueue):
    by_sql = Job.objects.get(pk=enqueue(args=[1], kwargs={"b": 2}, queue="sums", priority=7))
    by_python = Job.objects.get(
        pk=tasks.add.using(queue_name="sums", priority=7).enqueue(1, b=2).id
    )

    differing = {
        field.name
        for field in Job._meta.concrete_fields
        if getattr(by_sql, field.name) != getattr(by_python, field.name)
    }
    assert differing == {"id", "run_after", "enqueued_at", "max_attempts"}
    assert by_sql.run_after == by_sql.enqueued_at


def test_a_keyed_job_is_as_python_would_have_written_it(enqueue):
    by_sql = Job.objects.get(pk=enqueue(args=[1], key="a"))
    Job.objects.all().delete()
    by_python = Job.objects.get(pk=tasks.add.using(key="a").enqueue(1).id)

    differing = {
        field.name
        for field in Job._meta.concrete_fields
        if getattr(by_sql, field.name) != getattr(by_python, field.name)
    }
    assert differing == {"id", "run_after", "enqueued_at", "max_attempts"}


def test_a_task_alone_is_enough(enqueue, stranger):
    enqueue("tests.tasks.nothing")
    stranger.execute(
        "SELECT dbqueue_enqueue('tests.tasks.nothing', NULL, NULL, NULL, NULL, NULL, NULL)"
    )

    for job in Job.objects.all():
        assert (job.args, job.kwargs, job.queue, job.priority, job.state, job.key) == (
            [],
            {},
            "default",
            0,
            State.READY,
            None,
        )


def test_a_worker_runs_it(enqueue):
    pk = enqueue(args=[1], kwargs={"b": 2})

    drain()

    assert Job.objects.get(pk=pk).result == 3


@pytest.fixture
def options_of_mail(backend, monkeypatch):
    """The queue "mail" has a policy of its own."""
    config = backend.config.changed(per_queue={"mail": {"max_attempts": 4, "timeout": 30.0}})
    monkeypatch.setitem(vars(backend), "config", config)
    monkeypatch.delitem(vars(backend), "options_of", raising=False)
    yield
    vars(backend).pop("options_of", None)


POLICIES = [
    ("tests.tasks.fail", "mail", (4, timedelta(seconds=30), "retry")),
    ("tests.tasks.fail", "default", (1, None, "retry")),
    ("tests.tasks.fail_at_its_own_pace", "mail", (2, timedelta(seconds=9), "fail")),
]


@pytest.mark.parametrize(("task", "queue", "policy"), POLICIES)
def test_a_job_runs_by_the_policy_of_its_task_and_its_queue(
    enqueue, options_of_mail, task, queue, policy
):
    pk = enqueue(task, queue=queue)

    drain()

    job = Job.objects.get(pk=pk)
    assert (job.max_attempts, job.timeout, job.on_lost) == policy
    assert job.state == (State.FAILED if job.max_attempts == 1 else State.SCHEDULED)


def test_a_call_that_comes_while_the_job_starts_keeps_its_own_policy(
    enqueue, options_of_mail, claim
):
    enqueue("tests.tasks.fail", key="a")
    (job,) = claim()
    tasks.fail.using(key="a", queue_name="mail").enqueue()
    job.max_attempts, job.timeout = 1, None

    direct.save_policy(job)

    row = Job.objects.get()
    assert (row.max_attempts, row.timeout) == (4, timedelta(seconds=30))


def test_the_expiry_of_an_earlier_call_is_forgotten(enqueue):
    tasks.add.using(key="a", expires=timedelta(minutes=1)).enqueue(1)
    drain()
    Job.objects.update(expires_at=after(-60))

    enqueue(args=[2], key="a")
    drain()

    assert (Job.objects.get().state, Job.objects.get().result) == (State.SUCCESSFUL, 2)


def test_ids_are_of_version_7_and_in_the_order_of_time(enqueue):
    before = tasks.nothing.enqueue().id
    ids = [enqueue() for _ in range(20)]
    later = tasks.nothing.enqueue().id

    assert {(each.version, each.variant) for each in ids} == {(7, RFC_4122)}
    assert [UUID(before), *ids, UUID(later)] == sorted([UUID(before), *ids, UUID(later)])


@pytest.mark.parametrize(
    ("wait", "state"), [(timedelta(hours=1), State.SCHEDULED), (timedelta(hours=-1), State.READY)]
)
def test_it_waits_for_its_time(enqueue, wait, state):
    due = datetime.now(timezone.utc) + wait

    job = Job.objects.get(pk=enqueue(run_after=due))

    assert (job.state, job.run_after) == (state, due)


def nested(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


BAD = [
    ({"task": None}, "task NULL is not the path of a task"),
    ({"task": ""}, "task '' is not the path"),
    ({"task": "confirm"}, "task 'confirm' is not the path"),
    ({"task": "shop.tasks."}, "is not the path"),
    ({"task": "shop tasks.confirm"}, "is not the path"),
    ({"task": "shop." + "x" * 255}, "is not the path"),
    ({"args": {}}, "args must be a JSON array, not {}"),
    ({"args": "x"}, "args must be a JSON array"),
    ({"kwargs": [1]}, r"kwargs must be a JSON object, not \[1\]"),
    ({"queue": ""}, "queue '' is not the name"),
    ({"queue": "a,b"}, "queue 'a,b' is not the name"),
    ({"queue": "-mail"}, "queue '-mail' is not the name"),
    ({"queue": " mail"}, "is not the name"),
    ({"queue": "mail*"}, "is not the name"),
    ({"queue": "x" * 101}, "is not the name"),
    ({"priority": 101}, "priority must be a whole number between -100 and 100, not 101"),
    ({"priority": -101}, "not -101"),
    (
        {"run_after": "infinity"},
        "run_after must be a time within 36,500 days from now, not infinity",
    ),
    ({"run_after": "-infinity"}, "not -infinity"),
    ({"run_after": "294000-01-01"}, "run_after must be a time"),
    ({"run_after": "0044-03-15 BC"}, "run_after must be a time"),
    ({"key": ""}, "key must be text of 1 to 200 characters, not 0"),
    ({"key": "x" * 201}, "key must be text of 1 to 200 characters, not 201"),
    ({"args": [nested(31)]}, "nested more than 30 deep"),
    ({"kwargs": {"a": nested(300)}}, "nested more than 30 deep"),
    ({"args": [10**4001]}, "numbers of over 4,000 digits"),
    ({"kwargs": {"a": [{"b": 10**4001}]}}, "numbers of over 4,000 digits"),
]


@pytest.mark.parametrize(("given", "said"), BAD)
def test_what_cannot_be_is_refused_with_a_hint(enqueue, stranger, given, said):
    import psycopg

    with pytest.raises(psycopg.errors.InvalidParameterValue, match=said) as refused:
        if "run_after" in given:
            stranger.execute(
                "SELECT dbqueue_enqueue(%s, run_after => %s::text::timestamptz)",
                [ADD, given["run_after"]],
            )
        else:
            enqueue(**given)

    assert refused.value.sqlstate == "22023"
    assert str(refused.value).startswith("dbqueue_enqueue: ")
    assert refused.value.diag.message_hint
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    "given",
    [
        {"queue": "a b c" + "x" * 95},
        {"priority": -100},
        {"args": [nested(30)]},
        {"args": ["9" * 5000, 10**3900]},
        {"kwargs": {"ü": "ß 😀", "%": "%s"}},
        {"task": "a.b"},
        {"key": "x" * 200},
    ],
)
def test_what_is_just_allowed_is_what_python_reads(enqueue, given):
    job = Job.objects.get(pk=enqueue(**given))

    assert {name: getattr(job, name) for name in given if name != "key"} == {
        k: v for k, v in given.items() if k != "key"
    }


def test_a_string_with_a_nul_is_refused_by_the_database_itself(stranger):
    import psycopg

    with pytest.raises(psycopg.errors.UntranslatableCharacter):
        stranger.execute("SELECT dbqueue_enqueue(%s, %s::text::jsonb)", [ADD, json.dumps(["\x00"])])


# Keys


def test_of_one_key_there_is_one_row_with_what_was_asked_for_last(enqueue):
    first = enqueue(args=[1], key="a", queue="slow", priority=1)
    again = enqueue(args=[2], key="a", queue="mail", priority=2)

    assert first == again
    job = Job.objects.get()
    assert (job.args, job.queue, job.priority, job.key, job.state) == (
        [2],
        "mail",
        2,
        f"{ADD} a",
        State.READY,
    )
    assert enqueue("tests.tasks.nothing", key="a") != first


def test_python_and_sql_have_the_same_keys(enqueue):
    by_sql = enqueue(args=[1], key="a")

    result = tasks.add.using(key="a").enqueue(2)

    assert (result.id, result.enqueued) == (str(by_sql), "merged")
    assert enqueue(args=[3], key="a") == by_sql
    assert Job.objects.get().args == [3]


ROWS = {
    State.READY: {},
    State.BLOCKED: {"blocked_by": "x"},
    State.SCHEDULED: {"run_after": after(3600)},
    State.RUNNING: {"attempt": 3, "failures": 1, "attempts_before": 1, "started_at": after(-5)},
    State.SUCCESSFUL: {
        "attempt": 2,
        "finished_at": after(-5),
        "started_at": after(-9),
        "result": 7,
    },
    State.FAILED: {"attempt": 2, "failures": 2, "finished_at": after(-5), "started_at": after(-9)},
    State.DISCARDED: {"finished_at": after(-5)},
}


@pytest.mark.parametrize(
    "wait", [None, timedelta(minutes=5), timedelta(hours=2), timedelta(hours=-2)]
)
@pytest.mark.parametrize("state", ROWS)
def test_what_becomes_of_a_row_is_what_python_makes_of_it(enqueue, process, state, wait):
    """Two rows that are alike, but for their keys: one is met by Python, one by SQL."""
    values = {**ROWS[state], "process": process} if state == State.RUNNING else ROWS[state]
    for key in ("python", "sql"):
        given = {
            "run_after": after(-60),
            "enqueued_at": after(-600),
            "queue": "old",
            "args": [0],
            "version": 5,
        }
        given |= {"expires_at": after(600), **values}
        Job.objects.create(task=ADD, key=f"{ADD} {key}", state=state, **given)
    due = wait and datetime.now(timezone.utc) + wait

    called = tasks.add.using(key="python", run_after=due) if due else tasks.add.using(key="python")
    called.enqueue(1)
    enqueue(args=[1], key="sql", run_after=due)

    python, sql = (Job.objects.get(key=f"{ADD} {key}") for key in ("python", "sql"))
    for field in Job._meta.concrete_fields:
        one, other = getattr(python, field.name), getattr(sql, field.name)
        if isinstance(one, datetime) and isinstance(other, datetime):
            assert abs(one - other) < timedelta(seconds=5), field.name
        elif field.name not in ("id", "key", "max_attempts"):
            assert one == other, field.name


# Where it is called from


def test_a_trigger_enqueues_in_its_own_transaction_and_wakes_who_listens(stranger):
    stranger.execute(
        """
        CREATE FUNCTION notice_run() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM dbqueue_enqueue('tests.tasks.add', jsonb_build_array(NEW.job), queue => 'triggered');
            RETURN NEW;
        END $$;
        CREATE TRIGGER notice_run AFTER INSERT ON tests_run FOR EACH ROW EXECUTE FUNCTION notice_run();
        """
    )
    try:
        stranger.execute("LISTEN dbqueue")
        Run.objects.create(job="from a trigger")
        heard = [notice.payload for notice in stranger.notifies(timeout=5, stop_after=1)]
        with stranger.transaction(force_rollback=True):
            stranger.execute("INSERT INTO tests_run (job) VALUES ('never')")
    finally:
        stranger.execute("DROP TRIGGER notice_run ON tests_run; DROP FUNCTION notice_run")

    assert heard == ["triggered,0"]
    assert Job.objects.get().args == ["from a trigger"]


def test_a_running_worker_is_woken(enqueue, runqueue):
    worker = runqueue("--embedded", "--poll-interval", "60")
    until(lambda: "serves" in log_of(worker))
    first = enqueue(args=[1])
    until(lambda: Job.objects.get(pk=first).state == State.SUCCESSFUL)

    second = enqueue(args=[2])

    until(lambda: Job.objects.get(pk=second).state == State.SUCCESSFUL, seconds=10)


def test_the_table_is_found_whatever_the_callers_search_path_is(stranger):
    stranger.execute("SET search_path = pg_catalog")

    stranger.execute("SELECT public.dbqueue_enqueue(%s)", [ADD])

    assert Job.objects.exists()


@pytest.mark.parametrize(("rights", "key"), [("INSERT", None), ("INSERT, SELECT, UPDATE", "a")])
def test_the_rights_that_the_docs_name_are_enough(stranger, rights, key):
    with stranger.transaction(force_rollback=True):
        stranger.execute("CREATE ROLE dbqueue_writer")
        stranger.execute(f"GRANT {rights} ON dbqueue_job TO dbqueue_writer")
        stranger.execute("SET LOCAL ROLE dbqueue_writer")

        assert stranger.execute("SELECT dbqueue_enqueue(%s, key => %s)", [ADD, key]).fetchone()


def test_without_rights_on_the_table_nobody_enqueues(stranger):
    import psycopg

    with stranger.transaction(force_rollback=True):
        stranger.execute("CREATE ROLE dbqueue_nobody")
        stranger.execute("SET LOCAL ROLE dbqueue_nobody")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stranger.execute("SELECT dbqueue_enqueue(%s)", [ADD])


# The migration


def has_function(schema="public"):
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_proc WHERE proname = 'dbqueue_enqueue' AND pronamespace = %s::regnamespace",
            [schema],
        )
        return cursor.fetchone()[0] == 1


def test_the_migration_goes_back_and_forth():
    try:
        call_command("migrate", "dbqueue", "zero", verbosity=0)
        assert not has_function()
    finally:
        call_command("migrate", "dbqueue", verbosity=0)
    assert has_function()


def test_a_queue_in_a_schema_of_its_own_has_a_function_of_its_own(stranger):
    stranger.execute("CREATE SCHEMA apart")
    try:
        connection.cursor().execute("SET search_path = apart")
        MigrationExecutor(connection).migrate([("dbqueue", "0001_initial")])
        stranger.execute("SELECT apart.dbqueue_enqueue(%s)", [ADD])
        assert Job.objects.count() == 1
        MigrationExecutor(connection).migrate([("dbqueue", None)])
        assert not has_function("apart")
        assert has_function()
    finally:
        connection.close()
        stranger.execute("DROP SCHEMA apart CASCADE")
    assert not Job.objects.exists()
