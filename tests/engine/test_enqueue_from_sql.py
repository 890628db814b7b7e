"""``dbqueue_enqueue()``, the SQL function for PostgreSQL: called from psycopg and a trigger."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import datetime, timedelta, timezone
from itertools import product
from uuid import RFC_4122, UUID, uuid4

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.db.migrations.executor import MigrationExecutor

from django_dbqueue import Constant, Exponential, Linear, Rate, batch, limit, limits
from django_dbqueue.models import Batch, BatchShare, Execution, Job, Semaphore
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.testing import drain

from .. import direct, tasks
from ..conftest import LONG, log_of, until
from ..models import Run
from .test_batch_membership import BOTH, ENDED, SUCCESSFUL, finish
from .test_batches import settle

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(
        connection.vendor != "postgresql", reason="PostgreSQL alone has the function"
    ),
]
State = Job.State
ADD = "tests.tasks.add"
DOCUMENTS = ("args", "kwargs", "backoff", "concurrency", "rate")


@pytest.fixture
def sql_connection(transactional_db):
    """Return a psycopg connection independent of Django."""
    psycopg = pytest.importorskip("psycopg")
    given = connection.get_connection_params()
    names = ("host", "port", "user", "password", "dbname")
    with psycopg.connect(
        **{name: given[name] for name in names if name in given}, autocommit=True
    ) as other:
        yield other


@pytest.fixture
def enqueue(sql_connection):
    """Return a function that calls ``dbqueue_enqueue()`` with named arguments."""

    def enqueue(task=ADD, **given):
        from psycopg.types.json import Jsonb

        named = {
            name: Jsonb(value) if name in DOCUMENTS and value is not None else value
            for name, value in given.items()
        }
        extra = "".join(f", {name} => %({name})s" for name in named)
        row = sql_connection.execute(
            f"SELECT dbqueue_enqueue(%(task)s{extra})", {"task": task, **named}
        ).fetchone()
        return row[0]

    return enqueue


def test_sql_row_equals_python_row(enqueue):
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


def test_sql_row_with_key_equals_python_row(enqueue):
    by_sql = Job.objects.get(pk=enqueue(args=[1], key="a"))
    Job.objects.all().delete()
    by_python = Job.objects.get(pk=tasks.add.using(key="a").enqueue(1).id)

    differing = {
        field.name
        for field in Job._meta.concrete_fields
        if getattr(by_sql, field.name) != getattr(by_python, field.name)
    }
    assert differing == {"id", "run_after", "enqueued_at", "max_attempts"}


def test_only_the_task_argument_is_required(enqueue, sql_connection):
    enqueue("tests.tasks.nothing")
    sql_connection.execute(f"SELECT dbqueue_enqueue('tests.tasks.nothing'{', NULL' * 14})")

    for job in Job.objects.all():
        assert (job.options, job.limits) == (None, None)
        assert (job.args, job.kwargs, job.queue, job.priority, job.state, job.key) == (
            [],
            {},
            "default",
            0,
            State.READY,
            None,
        )


def test_worker_runs_job_enqueued_from_sql(enqueue):
    pk = enqueue(args=[1], kwargs={"b": 2})

    drain()

    assert Job.objects.get(pk=pk).result == 3


@pytest.fixture
def mail_queue_options(backend, monkeypatch):
    """Give the queue "mail" its own options."""
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
def test_job_gets_options_of_its_task_and_queue(enqueue, mail_queue_options, task, queue, policy):
    pk = enqueue(task, queue=queue)

    drain()

    job = Job.objects.get(pk=pk)
    assert (job.max_attempts, job.timeout, job.on_lost) == policy
    assert job.state == (State.FAILED if job.max_attempts == 1 else State.SCHEDULED)


def test_reenqueue_during_start_keeps_its_own_options(enqueue, mail_queue_options, claim):
    enqueue("tests.tasks.fail", key="a")
    (job,) = claim()
    tasks.fail.using(key="a", queue_name="mail").enqueue()
    job.max_attempts, job.timeout = 1, None

    direct.save_policy(job)

    row = Job.objects.get()
    assert (row.max_attempts, row.timeout) == (4, timedelta(seconds=30))


def test_reenqueue_clears_expiry_of_earlier_call(enqueue):
    tasks.add.using(key="a", expires=timedelta(minutes=1)).enqueue(1)
    drain()
    Job.objects.update(expires_at=now_plus(-60))

    enqueue(args=[2], key="a")
    drain()

    assert (Job.objects.get().state, Job.objects.get().result) == (State.SUCCESSFUL, 2)


def test_ids_are_uuid7_in_time_order(enqueue):
    before = tasks.nothing.enqueue().id
    ids = [enqueue() for _ in range(20)]
    later = tasks.nothing.enqueue().id

    assert {(each.version, each.variant) for each in ids} == {(7, RFC_4122)}
    assert [UUID(before), *ids, UUID(later)] == sorted([UUID(before), *ids, UUID(later)])


@pytest.mark.parametrize(
    ("wait", "state"), [(timedelta(hours=1), State.SCHEDULED), (timedelta(hours=-1), State.READY)]
)
def test_run_after_determines_the_state(enqueue, wait, state):
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
    ({"run_after": "0500-01-01"}, "run_after must be a time"),
    ({"run_after": "0999-12-31 23:59:59+00"}, "run_after must be a time"),
    ({"key": ""}, "key must be text of 1 to 200 characters, not '', which has 0"),
    ({"key": "x" * 201}, "key must be text of 1 to 200 characters, not 'xx"),
    ({"on_conflict": "once"}, "on_conflict 'once' needs a key, which is NULL"),
    (
        {"key": "a", "on_conflict": "merge"},
        "on_conflict must be 'rerun', 'skip', 'once' or 'replace', not 'merge'",
    ),
    ({"on_conflict": ""}, "on_conflict must be .*, not ''"),
    ({"on_conflict": "Once"}, "not 'Once'"),
    ({"on_conflict": "x" * 9999}, "not 'x{100}'"),
    ({"args": [nested(31)]}, "nested more than 30 deep"),
    ({"kwargs": {"a": nested(300)}}, "nested more than 30 deep"),
    ({"args": [10**4001]}, "numbers of over 4,000 digits"),
    ({"kwargs": {"a": [{"b": 10**4001}]}}, "numbers of over 4,000 digits"),
    ({"timeout": timedelta()}, "timeout must be an interval above 0 and below 3,650 days, not 0"),
    ({"timeout": timedelta(seconds=-1)}, "timeout must be .*, not -1 day"),
    ({"timeout": timedelta(days=3650)}, "not 3650 days"),
    ({"timeout": "1 month"}, "timeout must be an interval of equal length, not 1 mon"),
    ({"timeout": "1 year -300 days"}, "of equal length, not 1 year -300 days"),
    ({"max_attempts": 0}, "max_attempts must be a whole number from 1 to 32767, not 0"),
    ({"max_attempts": 32768}, "not 32768"),
    ({"on_lost": "ignore"}, "on_lost must be 'retry' or 'fail', not 'ignore'"),
    ({"on_lost": ""}, "on_lost must be .*, not ''"),
    (
        {"key": "a", "on_conflict": "once", "delete_on_success": True},
        "on_conflict 'once' needs the rows of finished jobs",
    ),
    *[
        ({"backoff": value}, "backoff is not a strategy: ")
        for value in (
            5,
            "constant",
            [],
            {},
            {"quadratic": {}},
            {"constant": 5},
            {"constant": {"delay": -1}},
            {"constant": {"delay": "5"}},
            {"constant": {"delay": None}},
            {"constant": {"delay": True}},
            {"constant": {"delay": [1]}},
            {"constant": {"step": 1}},
            {"linear": {"step": 1e10}},
            {"linear": {"first": 1}},
            {"exponential": {"jitter": 1.1}},
            {"exponential": {"delay": 1}},
            {"constant": {}, "linear": {}},
        )
    ],
    *[
        ({"concurrency": value}, "concurrency is not a limit: ")
        for value in (
            2,
            "2",
            {},
            [2],
            [[]],
            [{"most": 1}, None],
            {"most": 0},
            {"most": 1_000_000},
            {"most": 1.5},
            {"most": "2"},
            {"most": True},
            {"most": None},
            {"max_running": 1},
            {"most": 1, "number": 1},
            {"most": 1, "key": ""},
            {"most": 1, "key": None},
            {"most": 1, "key": "x" * 201},
            {"most": 1, "key": 1.5},
            {"most": 1, "key": True},
            {"most": 1, "key": [1]},
            {"most": 1, "key": {}},
            {"most": 1, "key": {"a": 1, "b": 2}},
            {"most": 1, "key": {"a": {"b": 1}}},
            {"most": 1, "key": {"a": None}},
            {"most": 1, "group": ""},
            {"most": 1, "group": "x" * 101},
            {"most": 1, "group": 5},
            {"most": 1, "on_conflict": "skip"},
            {"most": 1, "on_conflict": None},
            {"most": 1, "on_conflict": 1},
        )
    ],
    *[
        ({"rate": value}, "rate is not a rate: ")
        for value in (
            "5/s",
            {"per": 60},
            {"number": 0},
            {"number": 1, "per": 0},
            {"number": 1, "per": -1},
            {"number": 1, "per": "60"},
            {"number": 1, "per": True},
            {"number": 1, "per": 1e8},
            {"number": 1, "per": 10**400},
            {"number": 1, "burst": 0},
            {"number": 1, "most": 1},
            {"number": 1, "on_conflict": "wait"},
            [{"number": 1}, {}],
        )
    ],
    ({"concurrency": {"most": 2}, "rate": 5}, "rate is not a rate: 5"),
    ({"rate": {"number": 999_999, "per": 0.4}}, "is too fast, or its burst too long"),
    ({"rate": {"number": 1, "per": 86_400, "burst": 36_501}}, "is too fast, or its burst too long"),
]


@pytest.mark.parametrize(("given", "said"), BAD)
def test_invalid_argument_is_refused_with_a_hint(enqueue, sql_connection, given, said):
    import psycopg

    with pytest.raises(psycopg.errors.InvalidParameterValue, match=said) as refused:
        if "run_after" in given:
            sql_connection.execute(
                "SELECT dbqueue_enqueue(%s, run_after => %s::text::timestamptz)",
                [ADD, given["run_after"]],
            )
        else:
            enqueue(**given)

    assert refused.value.sqlstate == "22023"
    assert str(refused.value).startswith("dbqueue_enqueue: ")
    assert refused.value.diag.message_hint
    assert not Job.objects.exists()


def test_rate_that_float_rounds_to_the_bound_is_refused(sql_connection):
    import psycopg

    call = f"""SELECT dbqueue_enqueue('{ADD}', rate => '{{"number": 1, "per": %s}}')"""
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="rate is not a rate"):
        sql_connection.execute(call % "99999999.99999999999")
    sql_connection.execute(call % "99999999.99999999")

    assert limits.are_readable(Job.objects.get().options["rate"])


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
def test_boundary_values_are_accepted_and_read_back(enqueue, given):
    job = Job.objects.get(pk=enqueue(**given))

    assert {name: getattr(job, name) for name in given if name != "key"} == {
        k: v for k, v in given.items() if k != "key"
    }


def test_database_refuses_nul_in_arguments(sql_connection):
    import psycopg

    with pytest.raises(psycopg.errors.UntranslatableCharacter):
        sql_connection.execute(
            "SELECT dbqueue_enqueue(%s, %s::text::jsonb)", [ADD, json.dumps(["\x00"])]
        )


# Options of the call


@pytest.mark.parametrize(
    ("task", "queue", "given", "policy"),
    [
        ("fail", "mail", {"timeout": timedelta(seconds=1.5)}, (4, timedelta(seconds=1.5), "retry")),
        ("fail", "mail", {"max_attempts": 2}, (2, timedelta(seconds=30), "retry")),
        ("fail", "mail", {"on_lost": "fail"}, (4, timedelta(seconds=30), "fail")),
        ("fail", "mail", {"delete_on_success": True}, (4, timedelta(seconds=30), "retry")),
        ("fail_at_its_own_pace", "mail", {"max_attempts": 5}, (5, timedelta(seconds=9), "fail")),
        ("fail_at_its_own_pace", "mail", {"on_lost": "retry"}, (2, timedelta(seconds=9), "retry")),
        ("fail_at_its_own_pace", "mail", {"concurrency": []}, (2, timedelta(seconds=9), "fail")),
        (
            "fail",
            "default",
            {"timeout": timedelta(days=3649), "max_attempts": 32767, "on_lost": "retry"},
            (32767, timedelta(days=3649), "retry"),
        ),
    ],
)
def test_option_not_given_is_that_of_task_and_queue(
    enqueue, mail_queue_options, task, queue, given, policy
):
    pk = enqueue(f"tests.tasks.{task}", queue=queue, **given)

    drain()

    job = Job.objects.get(pk=pk)
    assert (job.max_attempts, job.timeout, job.on_lost) == policy


STRATEGIES = [
    Constant(delay=7, jitter=0),
    Linear(step=2.5, cap=9, jitter=0.0),
    Exponential(first=3, factor=4, jitter=0),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backoff_of_the_call_delays_its_retries(enqueue, strategy):
    stored = {type(strategy).__name__.lower(): vars(strategy)}
    pk = enqueue("tests.tasks.fail", max_attempts=3, backoff=stored)

    drain()

    job, end = Job.objects.get(pk=pk), Execution.objects.get().finished_at
    assert job.state == State.SCHEDULED
    assert abs((job.run_after - end).total_seconds() - strategy.seconds(1)) < 0.5


@pytest.mark.parametrize("own", [True, False])
def test_success_of_the_call_is_deleted_or_kept(enqueue, own):
    enqueue(args=[1], delete_on_success=own)
    enqueue(args=[2])

    drain()

    assert Job.objects.count() == 2 - own


def test_reenqueue_of_key_replaces_options_of_the_call(enqueue):
    enqueue(args=[1], key="a", max_attempts=3, concurrency={"most": 1})
    enqueue(args=[1], key="a", delete_on_success=False)

    assert Job.objects.get().options == {"delete_on_success": False}


@pytest.mark.parametrize("name", ["charge", "report", "withdraw", "deposit", "audit"])
def test_limits_of_the_task_equal_those_of_a_python_call(enqueue, name):
    args = [] if name == "audit" else [17]
    python = getattr(tasks, name).enqueue(*args)
    sql = enqueue(f"tests.tasks.{name}", args=args)

    drain()

    assert Job.objects.get(pk=sql).limits == Job.objects.get(pk=python.id).limits


LIMITS = [
    ({"most": 2}, limit(2)),
    ({"most": 2, "on_conflict": "discard"}, limit(2, on_conflict="discard")),
    ({"most": 2, "on_conflict": "wait", "key": {"a": 17}}, limit(2, key=lambda a: a)),
    ({"most": 999_999, "key": {"a": "17"}}, limit(999_999, key=lambda a: a)),
    ({"most": 2, "key": {"a+b": "1 2"}}, limit(2, key=lambda a, b: "1 2")),
    ({"most": 2, "key": 17}, limit(2, key=lambda: 17)),
    ({"most": 2, "key": -17}, limit(2, key=lambda: -17)),
    ({"most": 2, "key": "a=b c"}, limit(2, key=lambda: "a=b c")),
    ({"most": 2, "key": '{"a": 1}'}, limit(2, key=lambda: '{"a": 1}')),
    ({"most": 2, "group": "bank"}, limit(2, group="bank")),
    ({"most": 2, "group": 'the "big" bank'}, limit(2, group='the "big" bank')),
    ({"most": 2, "group": "bank", "key": 17}, limit(2, group="bank", key=lambda a: a)),
    ({"most": 2, "group": "bank", "key": {"a": 17}}, limit(2, group="bank", key=lambda a: a)),
    ([{"most": 2}, {"most": 1, "key": {"a": 17}}], (limit(2), limit(1, key=lambda a: a))),
    ([], ()),
    ({"number": 100, "per": 60}, Rate(100, per=60)),
    ({"number": 7, "per": 0.3, "burst": 5}, Rate(7, per=0.3, burst=5)),
    ({"number": 3}, Rate(3)),
    ({"number": 3, "group": "x", "key": "ü"}, Rate(3, group="x", key=lambda: "ü")),
    ([{"number": 3}, {"number": 9, "per": 60}], (Rate(3), Rate(9, per=60))),
]


@pytest.mark.parametrize(("given", "python"), LIMITS)
def test_limits_of_the_call_equal_those_of_a_python_call(enqueue, given, python):
    kind = "rate" if "number" in str(given) else "concurrency"
    want = limits.of_call(tasks.add.using(**{kind: python}), [17], {"b": 1})
    sql = enqueue("tests.tasks.add", args=[17], kwargs={"b": 1}, **{kind: given})

    drain()

    assert Job.objects.get(pk=sql).limits == want


def test_long_key_equals_that_of_a_python_call(enqueue):
    path, by, value = f"shop.{'x' * 250}", "account_id", "ü" * 200
    want = limit(2).of_call(f"{path} {by}={value}")

    pk = enqueue(path, concurrency={"most": 2, "key": {by: value}})

    assert Job.objects.get(pk=pk).options == {"concurrency": [want]}
    assert len(want["key"]) == limits.LONGEST_KEY


def test_limit_of_the_call_is_shared_with_python(enqueue):
    tasks.charge.enqueue(17)
    own = {"concurrency": {"most": 2, "key": {"account": 17}}}
    for _ in range(2):
        enqueue("tests.tasks.charge", args=[17], **own)
    enqueue("tests.tasks.charge", args=[17], concurrency=[])

    drain()

    assert set(Job.objects.values_list("state", flat=True)) == {"successful"}
    assert Semaphore.objects.count() == 1


# Keys


def test_reenqueue_of_key_updates_its_row(enqueue):
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


def test_python_and_sql_share_keys(enqueue):
    by_sql = enqueue(args=[1], key="a")

    result = tasks.add.using(key="a").enqueue(2)

    assert (result.id, result.enqueued) == (str(by_sql), "merged")
    assert enqueue(args=[3], key="a") == by_sql
    assert Job.objects.get().args == [3]


ROWS = {
    State.READY: {},
    State.BLOCKED: {"blocked_by": "x"},
    State.SCHEDULED: {"run_after": now_plus(3600)},
    State.RUNNING: {"attempt": 3, "failures": 1, "attempts_before": 1, "started_at": now_plus(-5)},
    "rerun_requested": {"state": State.RUNNING, "rerun_requested": True, "attempt": 3},
    State.SUCCESSFUL: {
        "attempt": 2,
        "finished_at": now_plus(-5),
        "started_at": now_plus(-9),
        "result": 7,
    },
    State.FAILED: {
        "attempt": 2,
        "failures": 2,
        "finished_at": now_plus(-5),
        "started_at": now_plus(-9),
    },
    State.DISCARDED: {"finished_at": now_plus(-5)},
}


@pytest.mark.parametrize(
    "wait", [None, timedelta(minutes=5), timedelta(hours=2), timedelta(hours=-2)]
)
@pytest.mark.parametrize("state", ROWS)
def test_sql_upsert_equals_python_upsert_in_every_state(enqueue, process, state, wait):
    """Upsert two rows that differ only in their keys, one from Python and one from SQL."""
    values = {"state": state, "run_after": now_plus(-60), **ROWS[state]}
    if values["state"] == State.RUNNING:
        values["process"] = process
    due = wait and datetime.now(timezone.utc) + wait
    own, shared = uuid4(), uuid4()
    for case in product((None, "rerun", "skip", "once", "replace"), (None, own), (None, shared)):
        on_conflict, batch_id, shared_by = case
        rows = []
        for name in ("python", "sql"):
            key = f"{name} {on_conflict} {batch_id} {shared_by}"
            row = Job.objects.create(
                task=ADD,
                key=f"{ADD} {key}",
                enqueued_at=now_plus(-600),
                expires_at=now_plus(600),
                queue="old",
                args=[0],
                version=5,
                batch_id=batch_id,
                **values,
            )
            if shared_by:
                for has_failed in (False, True):
                    BatchShare.objects.create(
                        batch_id=shared_by, job=row.pk, attempt=2, has_failed=has_failed
                    )
            if name == "python":
                tasks.add.using(key=key, run_after=due, on_conflict=on_conflict).enqueue(1)
            else:
                enqueue(args=[1], key=key, run_after=due, on_conflict=on_conflict)
            rows.append(Job.objects.get(pk=row.pk))

        python, sql = rows
        for field in Job._meta.concrete_fields:
            one, other = getattr(python, field.attname), getattr(sql, field.attname)
            if isinstance(one, datetime) and isinstance(other, datetime):
                assert abs(one - other) < timedelta(seconds=5), (case, field.name)
            elif field.name not in ("id", "key", "max_attempts"):
                assert one == other, (case, field.name)
        assert shares_of(python) == shares_of(sql), case


def shares_of(job):
    shares = BatchShare.objects.filter(job=job.pk)
    return sorted(shares.values_list("batch", "attempt", "has_failed"))


# Keys of jobs in batches


@pytest.mark.parametrize(
    ("state", "follows"),
    [(State.SUCCESSFUL, SUCCESSFUL), (State.FAILED, ENDED), (State.DISCARDED, ENDED)],
)
def test_rerun_of_ended_member_keeps_its_outcome_and_does_not_delay_the_batch(
    enqueue, claim, state, follows
):
    for number in (1, 2):
        with batch(**BOTH):
            tasks.add.using(key="a").enqueue(number)
    settle(*claim(), state=state)

    enqueue(args=[3], key="a", run_after=datetime.now(timezone.utc) + timedelta(days=1))

    assert finish() == sorted(2 * follows)


def test_success_of_outside_rerun_does_not_replace_failure_of_member(enqueue, claim):
    with batch(**BOTH):
        tasks.add.using(key="a").enqueue(1)
        settle(*claim(), state=State.FAILED)
        enqueue(args=[2], key="a")
        settle(*claim())

    assert finish() == ENDED


def test_outside_rerun_is_not_discarded_with_the_batch(enqueue, claim):
    with pytest.raises(ZeroDivisionError), batch(**BOTH):
        tasks.add.using(key="a").enqueue(1)
        settle(*claim())
        enqueue(args=[2], key="a")
        raise ZeroDivisionError

    assert Job.objects.get().state == State.READY


@pytest.mark.parametrize(
    ("state", "follows"), [(State.SUCCESSFUL, SUCCESSFUL), (State.FAILED, ENDED)]
)
def test_outside_call_during_run_of_member_does_not_delay_the_batch(enqueue, claim, state, follows):
    with batch(**BOTH):
        tasks.add.using(key="a").enqueue(1)
    jobs = claim()
    for number in (2, 3):
        due = datetime.now(timezone.utc) + timedelta(days=number)
        enqueue(args=[number], key="a", run_after=due)

    assert finish() == []
    settle(*jobs, state=state)
    assert finish() == follows
    assert Job.objects.get(args=[3]).state == State.SCHEDULED


def test_outside_call_while_member_waits_belongs_to_the_batch(enqueue, claim):
    with batch(**BOTH):
        tasks.add.using(key="a").enqueue(1)
    enqueue(args=[2], key="a")

    assert finish() == []
    settle(*claim(), state=State.FAILED)
    assert finish() == ENDED


def test_ignored_outside_call_leaves_ended_member_in_batch(enqueue, claim):
    with batch(**BOTH) as opened:
        tasks.add.using(key="a").enqueue(1)
    settle(*claim(), state=State.FAILED)

    enqueue(args=[2], key="a", on_conflict="once")

    assert str(Job.objects.get().batch_id) == str(opened.id)
    assert not BatchShare.objects.exists()


def test_outside_call_that_waits_for_the_end_of_a_run_keeps_its_failure(enqueue, claim):
    with batch(**BOTH):
        tasks.add.using(key="a").enqueue(1)
    jobs = claim()
    with ThreadPoolExecutor(1) as thread:
        with transaction.atomic():
            settle(*jobs, state=State.FAILED)
            waiting = thread.submit(enqueue, args=[2], key="a")
            with pytest.raises(FutureTimeout):
                waiting.result(0.3)
        waiting.result(LONG)

    assert finish() == ENDED


def test_outside_call_rolled_back_leaves_member_in_batch(enqueue, claim, sql_connection):
    with batch(**BOTH) as opened:
        tasks.add.using(key="a").enqueue(1)
    settle(*claim(), state=State.FAILED)

    with sql_connection.transaction(force_rollback=True):
        enqueue(args=[2], key="a")

    assert Batch.objects.get(pk=opened.id).progress() == {State.FAILED: 1}
    assert not BatchShare.objects.exists()


@pytest.mark.parametrize("on_conflict", ["rerun", "skip", "once", "replace"])
def test_every_on_conflict_creates_job_of_new_key(enqueue, on_conflict):
    pk = enqueue(args=[1], key="a", on_conflict=on_conflict)

    drain()

    assert Job.objects.get(pk=pk).result == 1


def test_ignored_call_returns_id_of_existing_job_and_does_not_notify(enqueue, sql_connection):
    first = enqueue(args=[1], key="a", on_conflict="once")
    assert enqueue(args=[2], key="a", on_conflict="skip") == first
    drain()
    before = Job.objects.values().get()
    sql_connection.execute("LISTEN dbqueue")

    assert enqueue(args=[3], key="a", on_conflict="once") == first

    assert not list(sql_connection.notifies(timeout=0.5, stop_after=1))
    assert Job.objects.values().get() == before


def test_once_from_sql_and_once_from_python_share_keys(enqueue):
    by_python = tasks.add.using(key="a", on_conflict="once").enqueue(1)

    assert enqueue(args=[2], key="a", on_conflict="once") == UUID(by_python.id)
    assert Job.objects.get().args == [1]


def test_once_for_many_rows_in_one_statement_creates_one_job_per_key(sql_connection):
    rows = sql_connection.execute(
        "SELECT dbqueue_enqueue(%s, key => (number %% 3)::text, on_conflict => 'once') "
        "FROM generate_series(1, 9) AS number",
        [ADD],
    ).fetchall()

    assert len(set(rows)) == Job.objects.count() == 3


def test_once_waits_for_uncommitted_job_of_its_key(enqueue, sql_connection):
    with ThreadPoolExecutor(1) as thread:
        with transaction.atomic():
            result = tasks.add.using(key="a", on_conflict="once").enqueue(1)
            waiting = thread.submit(enqueue, args=[2], key="a", on_conflict="once")
            with pytest.raises(FutureTimeout):
                waiting.result(0.3)
        assert waiting.result(LONG) == UUID(result.id)

    assert Job.objects.get().args == [1]


# Callers


def test_trigger_enqueues_in_its_transaction_and_notifies(sql_connection):
    sql_connection.execute(
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
        sql_connection.execute("LISTEN dbqueue")
        Run.objects.create(job="from a trigger")
        heard = [notice.payload for notice in sql_connection.notifies(timeout=5, stop_after=1)]
        with sql_connection.transaction(force_rollback=True):
            sql_connection.execute("INSERT INTO tests_run (job) VALUES ('never')")
    finally:
        sql_connection.execute("DROP TRIGGER notice_run ON tests_run; DROP FUNCTION notice_run")

    assert heard == ["triggered,0"]
    assert Job.objects.get().args == ["from a trigger"]


def test_sql_enqueue_wakes_running_worker(enqueue, runqueue):
    worker = runqueue("--embedded", "--poll-interval", "60")
    until(lambda: "serves" in log_of(worker))
    first = enqueue(args=[1])
    until(lambda: Job.objects.get(pk=first).state == State.SUCCESSFUL)

    second = enqueue(args=[2])

    until(lambda: Job.objects.get(pk=second).state == State.SUCCESSFUL, seconds=10)


def test_function_ignores_search_path_of_caller(sql_connection):
    sql_connection.execute("SET search_path = pg_catalog")

    sql_connection.execute("SELECT public.dbqueue_enqueue(%s)", [ADD])

    assert Job.objects.exists()


@pytest.mark.parametrize("state", [State.READY, State.RUNNING, State.SUCCESSFUL, State.FAILED])
@pytest.mark.parametrize("on_conflict", [None, "rerun", "once"])
def test_documented_privileges_are_sufficient(enqueue, sql_connection, claim, state, on_conflict):
    key = on_conflict and "a"
    with batch():
        tasks.add.using(key=key).enqueue(1)
    jobs = claim() if state != State.READY else []
    if state != State.RUNNING:
        settle(*jobs, state=state)
    rights = {"dbqueue_job": "INSERT", "dbqueue_statisticdelta": "INSERT"}
    if key:
        rights["dbqueue_job"] = "INSERT, SELECT, UPDATE"
        rights["dbqueue_batchshare"] = "INSERT, SELECT, UPDATE, DELETE"
    with sql_connection.transaction(force_rollback=True):
        sql_connection.execute("CREATE ROLE dbqueue_writer")
        for table, names in rights.items():
            sql_connection.execute(f"GRANT {names} ON {table} TO dbqueue_writer")
        sql_connection.execute("SET LOCAL ROLE dbqueue_writer")

        assert enqueue(key=key, on_conflict=on_conflict)


def test_enqueue_without_privileges_is_refused(sql_connection):
    import psycopg

    with sql_connection.transaction(force_rollback=True):
        sql_connection.execute("CREATE ROLE dbqueue_nobody")
        sql_connection.execute("SET LOCAL ROLE dbqueue_nobody")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            sql_connection.execute("SELECT dbqueue_enqueue(%s)", [ADD])


# Migration


def has_function(schema="public"):
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_proc WHERE proname = 'dbqueue_enqueue' AND pronamespace = %s::regnamespace",
            [schema],
        )
        return cursor.fetchone()[0] == 1


def test_migration_is_reversible():
    try:
        call_command("migrate", "dbqueue", "zero", verbosity=0)
        assert not has_function()
    finally:
        call_command("migrate", "dbqueue", verbosity=0)
    assert has_function()


def test_each_schema_gets_its_own_function(sql_connection):
    sql_connection.execute("CREATE SCHEMA apart")
    try:
        connection.cursor().execute("SET search_path = apart")
        MigrationExecutor(connection).migrate([("dbqueue", "0001_initial")])
        sql_connection.execute("SELECT apart.dbqueue_enqueue(%s)", [ADD])
        assert Job.objects.count() == 1
        MigrationExecutor(connection).migrate([("dbqueue", None)])
        assert not has_function("apart")
        assert has_function()
    finally:
        connection.close()
        sql_connection.execute("DROP SCHEMA apart CASCADE")
    assert not Job.objects.exists()
