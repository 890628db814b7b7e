"""``contrib.celery``: Celery's words for tasks of this queue, compared with Celery itself."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import types
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from importlib import import_module
from pathlib import Path

import django
import pytest
from django.core import mail
from django.core.checks import run_checks
from django.db import transaction
from django.test import override_settings

from django_dbqueue import Rate
from django_dbqueue.compat import InvalidTask, TaskResultDoesNotExist
from django_dbqueue.contrib import celery as shim
from django_dbqueue.contrib.celery import (
    AsyncResult,
    MaxRetriesExceededError,
    Retry,
    SharedTask,
    SoftTimeLimitExceeded,
    TaskFailed,
    TaskRevokedError,
    chain,
    chord,
    crontab,
    group,
    shared_task,
)
from django_dbqueue.contrib.celery.canvas import finish_chord, known_tasks
from django_dbqueue.contrib.celery.missing import MISSING
from django_dbqueue.contrib.celery.subset import NEED_NOTHING, REMEDIES
from django_dbqueue.models import Execution, Job
from django_dbqueue.recurrence.cron import Cron
from django_dbqueue.testing import advance, drain

from .conftest import LONG, until

PROJECT = Path(__file__).with_name("celery_project")
IMPORTS = {
    "from celery import": "from django_dbqueue.contrib.celery import",
    "from celery.exceptions import": "from django_dbqueue.contrib.celery import",
    "from celery.result import": "from django_dbqueue.contrib.celery import",
    "from celery.schedules import": "from django_dbqueue.contrib.celery import",
    "from celery.utils.log import get_task_logger": "from logging import getLogger as get_task_logger",
}
FRAMEWORK = InvalidTask.__module__.partition(".exceptions")[0]
# Routes of tasks are no setting here.
ROUTES = {
    '@shared_task(rate_limit="100/m")': '@shared_task(rate_limit="100/m", queue="mail")',
    "@shared_task()\ndef confirm": '@shared_task(queue="mail")\ndef confirm',
    "autoretry_for=(ConnectionError,),": 'autoretry_for=(ConnectionError,), queue="payments",',
}
NOON = datetime(2026, 5, 1, 12, tzinfo=timezone.utc)


@contextmanager
def copy_of_project(folder, name, files, changes):
    """Make the files of the project a package of this name, with these changes of their text."""
    (folder / name).mkdir()
    for file, source in files.items():
        text = (PROJECT / source).read_text() if source else ""
        for before, after in changes.items():
            text = text.replace(before, after)
        (folder / name / file).write_text(text.replace("celery_project", name))
    sys.path.insert(0, str(folder))
    try:
        yield name
    finally:
        sys.path.remove(str(folder))
        for module in [each for each in sys.modules if each.partition(".")[0] == name]:
            del sys.modules[module]


def module_of(shop, name):
    return import_module(f"{shop.__package__}.{name}")


@pytest.fixture(scope="module")
def moved_once(tmp_path_factory):
    files = {
        "__init__.py": "",
        "settings.py": "moved_settings.py",
        "tasks.py": "tasks.py",
        "views.py": "views.py",
    }
    folder = tmp_path_factory.mktemp("moved")
    with copy_of_project(folder, "celery_project_moved", files, IMPORTS | ROUTES) as name:
        of_project = import_module(f"{name}.settings")
        with override_settings(TASKS=of_project.TASKS):
            tasks = import_module(f"{name}.tasks")
        yield tasks, of_project


@pytest.fixture
def moved(moved_once, settings):
    """The tasks of the project with this queue."""
    tasks, of_project = moved_once
    settings.TASKS, settings.DBQUEUE_CELERY_BROKER = of_project.TASKS, "rabbitmq"
    tasks.calls.clear()
    return tasks


@pytest.fixture(scope="module")
def original_once(tmp_path_factory):
    finalizers = pytest.importorskip("celery._state")._on_app_finalizers
    before = set(finalizers)
    names = ["__init__.py", "celery.py", "settings.py", "tasks.py", "views.py"]
    folder = tmp_path_factory.mktemp("original")
    with copy_of_project(folder, "celery_project_original", {n: n for n in names}, {}) as name:
        app = import_module(name).celery_app
        given = vars(import_module(f"{name}.settings"))
        app.conf.update(task_always_eager=True, task_store_eager_result=True)
        tasks = import_module(f"{name}.tasks")
        yield tasks, {key: given[key] for key in given if key.startswith("CELERY_")}
        app.close()
    # Celery registers shared tasks with each later app, such as that of a second copy.
    finalizers.intersection_update(before)


@pytest.fixture
def original(original_once, settings):
    """The tasks of the project with Celery, which runs them at once."""
    tasks, of_project = original_once
    for name, value in of_project.items():  # Celery reads them at any time.
        setattr(settings, name, value)
    tasks.calls.clear()
    return tasks


@pytest.fixture(autouse=True)
def mailer(settings):
    if django.VERSION >= (6, 1):
        settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}


@pytest.fixture
def app(original):
    return module_of(original, "celery").app


def run_all():
    """Run all jobs, and their retries without the delay."""
    while drain() or Job.objects.scheduled().run_now():
        pass


@shared_task
def add(a, b):
    return a + b


@shared_task(bind=True, name="math.describe", max_retries=1, priority=None)
def describe(self, *args, **kwargs):
    request = self.request
    return {
        "id": request.id,
        "args": list(request.args),
        "kwargs": request.kwargs,
        "retries": request.retries,
        "called_directly": request.called_directly,
        "queue": request.delivery_info.get("routing_key"),
        "name": self.name,
        "task": request.task,
        "worker": request.hostname,
    }


@shared_task(bind=True)
def send_template(self, template, context):
    return f"{template} with {context}"


@shared_task(bind=True, max_retries=1)
def calls_another(self):
    return describe(1), self.request.called_directly


@shared_task(bind=True, max_retries=1)
def wants_more(self):
    self.retry(max_retries=9)


@shared_task(soft_time_limit=60, expires=600, rate_limit="90/m", acks_late=False, queue="mail")
def limited():
    pass


@shared_task(expires=600)
def short_lived(number):
    return number


@shared_task(soft_time_limit=0.2, autoretry_for=(Exception,), default_retry_delay=0, max_retries=1)
def slow():
    try:
        while True:
            pass
    except SoftTimeLimitExceeded:
        raise


@shared_task
def total(numbers, extra=0):
    return sum(numbers) + extra


@shared_task
def fail():
    raise ValueError("seven")


def attempts(task):
    return Execution.objects.filter(job__task=task.module_path).count()


# Beside Celery


CALLS = {
    "mail on sign-up": lambda shop: shop.sign_up("ada@example.com"),
    "nightly clean-up": lambda shop: shop.clean_up.delay(days=7),
    "chord of a report": lambda shop: shop.make_report(),
    "chain": lambda shop: shop.count(),
    "chain by pipes": lambda shop: shop.count_by_pipes(),
    "group": lambda shop: shop.count_beside(),
    "first attempt succeeds": lambda shop: shop.ask.delay(0),
    "third attempt succeeds": lambda shop: shop.ask.delay(2),
    "no attempt succeeds": lambda shop: shop.ask.delay(9),
    "retry without exc": lambda shop: shop.ask_for_ever.delay(),
    "lower max_retries": lambda shop: shop.ask_twice.delay(),
    "lower max_retries with autoretry_for": lambda shop: shop.ask_twice_of_four.delay(),
    "task handles its last retry": lambda shop: shop.tell_the_last.delay(),
    "automatic retry": lambda shop: shop.sync.delay("busy"),
    "dont_autoretry_for": lambda shop: shop.sync.delay("unknown"),
    "other error": lambda shop: shop.sync.delay("value"),
    "no error": lambda shop: shop.sync.delay(""),
    "options of the call": lambda shop: shop.part.apply_async(
        (4,), countdown=0, expires=60, retry=False
    ),
    "keyword arguments": lambda shop: shop.part.apply_async(kwargs={"number": 4}),
    "signature": lambda shop: shop.report.s("June").delay([1]),
    "automatic retry with backoff": lambda shop: shop.pay.delay(4),
    "chord of chains": lambda shop: shop.pack(3),
    "eta, priority and queue of a call": lambda shop: shop.pay_tomorrow(5, NOON),
    "expires and time_limit of a call": lambda shop: shop.confirm_in_time(5),
    "immutable signature": lambda shop: shop.report.si([2], "June").delay([1]),
}


RETURNED = {
    "mail on sign-up": "ada@example.com",
    "chord of a report": "May: [30, 10, 20]",
    "chord of chains": "3: 300 g, 400 g",
    "automatic retry with backoff": "4 is paid",
    "eta, priority and queue of a call": "5 is paid",
    "expires and time_limit of a call": None,
}


def outcome(shop, result):
    """What a caller sees: states, results, mail, and the calls that the tasks have noted."""
    results = getattr(result, "results", [result])
    states = [each.state for each in results]
    values = [each.result if each.successful() else None for each in results]
    return states, values, shop.calls, [each.subject for each in mail.outbox]


@pytest.mark.django_db
@pytest.mark.parametrize("call", CALLS)
def test_shim_gives_the_results_states_and_attempts_of_celery(call, original, moved):
    of_celery = outcome(original, CALLS[call](original))
    mail.outbox.clear()

    result = CALLS[call](moved)
    run_all()

    assert outcome(moved, result) == of_celery
    if call in RETURNED:
        assert of_celery[:2] == (["SUCCESS"], [RETURNED[call]])


@pytest.mark.django_db
def test_views_answer_as_with_celery(original, moved, rf, django_capture_on_commit_callbacks):
    seen = []
    for shop in (original, moved):
        views = module_of(shop, "views")
        mail.outbox.clear()
        with django_capture_on_commit_callbacks(execute=True):
            ids = json.loads(views.order(rf.post("/"), 17).content)
        if shop is moved:
            waiting = [json.loads(views.state(rf.get("/"), each).content) for each in ids.values()]
            assert waiting == [{"state": "PENDING", "ready": False}] * 2
            run_all()
        answers = {
            name: json.loads(views.state(rf.get("/"), each).content) for name, each in ids.items()
        }
        seen.append((answers, sorted(shop.calls), [each.subject for each in mail.outbox]))

    assert seen[1] == seen[0]
    assert seen[0] == (
        {
            "paid": {"state": "SUCCESS", "ready": True, "result": "17 is paid"},
            "packed": {"state": "SUCCESS", "ready": True, "result": "17: 1700 g, 1800 g"},
        },
        ["pay 17"] * 3,
        ["Order 17"],
    )


@pytest.mark.django_db
def test_jobs_have_the_options_of_messages_of_celery(original, moved, app):
    from celery.signals import before_task_publish

    tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
    calls = [
        lambda shop: shop.pay_tomorrow(5, tomorrow),
        lambda shop: shop.confirm_in_time(5),
        lambda shop: shop.pay.apply_async((5,), countdown=60, expires=3600, priority=7),
        lambda shop: shop.remind.delay("ada@example.com"),
        lambda shop: shop.weigh.delay(5),
    ]
    sent = []

    def keep(headers, properties, routing_key, **others):
        sent.append(
            (
                headers["task"].replace("_original", "_moved"),
                routing_key,
                properties.get("priority") or 0,
                min(filter(None, headers["timelimit"])),
                *(
                    headers[name] and datetime.fromisoformat(headers[name])
                    for name in ("eta", "expires")
                ),
            )
        )

    app.conf.task_always_eager = False
    before_task_publish.connect(keep)
    try:
        for call in calls:
            call(original)
    finally:
        before_task_publish.disconnect(keep)
        app.conf.task_always_eager = True
    for call in calls:
        call(moved)

    jobs = list(Job.objects.order_by("pk"))
    for job, (task, queue, priority, timeout, eta, expires) in zip(jobs, sent, strict=True):
        assert (job.task, job.queue, job.priority) == (task, queue, priority)
        assert job.timeout == timedelta(seconds=timeout)
        assert (job.state == "scheduled") == bool(eta)
        if eta:
            assert abs(job.run_after - eta) < timedelta(seconds=20)
        if expires:
            assert abs(job.expires_at - expires) < timedelta(seconds=20)


def test_schedules_have_the_times_of_celery(original, moved, app, settings):
    ours = settings.TASKS["default"]["OPTIONS"]["recurring"]
    assert ours.keys() == app.conf.beat_schedule.keys()
    for name, entry in app.conf.beat_schedule.items():
        celerys = entry["schedule"]
        times = Cron(ours[name]["cron"], ours[name]["timezone"]).next_times(50, after=NOON)
        at, found = NOON, []
        for _ in times:
            celerys.nowfun = lambda at=at: at
            at = at + celerys.remaining_estimate(at)
            found.append(at)
        assert found == list(times), name


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["clean up", "remind", "invoice", "plan"])
def test_schedules_have_the_results_of_celery(name, original, moved, app):
    entry = app.conf.beat_schedule[name]
    called = entry.get("args", ()), entry.get("kwargs", {})
    result = app.tasks[entry["task"]].apply_async(*called, **entry.get("options", {}))
    of_celery = outcome(original, result)
    mail.outbox.clear()

    advance(days=7 if name == "remind" else 366, recurring=[name])
    first = Job.objects.order_by("pk").first()
    Job.objects.exclude(pk=first.pk).delete()
    run_all()

    assert outcome(moved, AsyncResult(str(first.pk))) == of_celery
    assert first.priority == entry.get("options", {}).get("priority", 0)


def test_tasks_of_the_project_are_those_that_celery_discovers(original, moved, app):
    ours = {task.module_path for task in vars(moved).values() if isinstance(task, SharedTask)}
    app.autodiscover_tasks([original.__package__], force=True)
    theirs = {name for name in app.tasks if not name.startswith("celery.")}
    debug = f"{original.__package__}.celery.debug_task"
    assert len(ours) > 15
    assert {task.name for task in known_tasks.values() if task.module_path in ours} == {
        name.replace("_original", "_moved") for name in theirs - {debug}
    }


@pytest.mark.parametrize("jitter", [False, True])
def test_delays_of_automatic_retries_are_those_of_celery(jitter):
    delay_of = pytest.importorskip("celery.utils.time").get_exponential_backoff_interval
    options = {"autoretry_for": (ValueError,), "retry_backoff": 3, "retry_backoff_max": 40}
    backoff = shared_task(**options, retry_jitter=jitter)(fail.celery.function).backoff

    for retries in range(8):
        result = types.SimpleNamespace(errors=[None] * (retries + 1))
        ours = {backoff(ValueError(), result) for _ in range(300)}
        theirs = {delay_of(3, retries, 40, jitter) for _ in range(300)}
        assert (min(ours) >= 0, max(ours) <= 40) == (True, True)
        assert jitter or ours == theirs


# Calls


@pytest.mark.django_db
class TestCall:
    def test_delay_writes_one_job_in_the_transaction(self):
        with transaction.atomic():
            add.delay(1, b=2)
            transaction.set_rollback(True)
        result = add.delay(1, b=2)

        assert drain() == 1
        assert (result.state, result.get(), str(result)) == ("SUCCESS", 3, result.id)

    def test_delay_on_commit_waits_for_it(self, django_capture_on_commit_callbacks):
        with django_capture_on_commit_callbacks(execute=True):
            add.delay_on_commit(1, 2)
            add.apply_async_on_commit((1, 2), countdown=60)
            assert not Job.objects.exists()

        assert sorted(Job.objects.values_list("state", flat=True)) == ["ready", "scheduled"]

    def test_options_of_a_call_are_those_of_its_job(self):
        add.apply_async((1, 2), countdown=60, expires=600, queue="mail", time_limit=5)

        job = Job.objects.get()
        assert (job.queue, job.timeout, job.state) == ("mail", timedelta(seconds=5), "scheduled")
        # Celery counts expires from the call.
        assert (job.expires_at - job.run_after).total_seconds() == pytest.approx(540, abs=1)

    def test_times_of_a_call_may_be_datetimes(self):
        eta = datetime.now(timezone.utc) + timedelta(hours=1)
        add.apply_async((1, 2), eta=eta, expires=eta + timedelta(hours=1))
        add.apply_async((1, 2), eta=eta, expires=7200)

        assert {job.run_after for job in Job.objects.all()} == {eta}
        for job in Job.objects.all():
            assert (job.expires_at - eta).total_seconds() == pytest.approx(3600, abs=5)

    def test_options_of_the_decorator_are_those_of_the_task(self):
        limited.apply_async(countdown=60)

        job = Job.objects.get()
        assert (job.queue, job.on_lost, job.timeout) == ("mail", "fail", timedelta(seconds=60))
        assert (job.expires_at - job.run_after).total_seconds() == pytest.approx(540, abs=1)
        assert limited.rate == Rate(1, per=60 / 90)
        assert (add.max_attempts, add.max_retries, add.on_lost) == (4, 3, "retry")

    def test_time_limit_within_the_grace_is_accepted(self):
        made = shared_task(soft_time_limit=60, time_limit=64, max_retries=None)(the_function)

        assert (made.timeout, made.max_attempts) == (60, 32767)

    @pytest.mark.parametrize(("broker", "expected"), [("rabbitmq", 7), ("redis", -7)])
    def test_priority_is_ordered_as_by_the_broker(self, settings, broker, expected):
        settings.DBQUEUE_CELERY_BROKER = broker
        add.apply_async((1, 2), priority=7)

        assert Job.objects.get().priority == expected

    def test_call_of_the_task_runs_it_without_the_queue(self):
        assert add(1, 2) == 3
        assert describe(1)["called_directly"] is True
        assert not Job.objects.exists()

    def test_arguments_are_checked_at_the_call(self):
        with pytest.raises(TypeError, match="missing a required argument: 'b'"):
            add.delay(1)

    def test_request_describes_the_job(self):
        result = describe.delay(1, two=2)
        drain()

        got = result.get()
        worker = got.pop("worker")
        path = f"{__name__}.describe"
        assert worker
        assert got == {
            "id": result.id,
            "args": [1],
            "kwargs": {"two": 2},
            "retries": 0,
            "called_directly": False,
            "queue": "default",
            "name": "math.describe",
            "task": path,
        }

    def test_task_may_have_an_argument_named_context(self):
        result = send_template.delay("welcome", context={"a": 1})
        drain()

        assert result.get() == "welcome with {'a': 1}"

    def test_task_that_calls_another_has_a_request_of_its_own(self):
        result = calls_another.delay()
        drain()

        inner, outer = result.get()
        assert (inner["called_directly"], inner["id"], outer) == (True, None, False)

    def test_task_past_its_soft_time_limit_is_retried_for_exception(self):
        result = slow.delay()
        run_all()

        assert (result.state, attempts(slow)) == ("FAILURE", 2)
        assert set(Execution.objects.values_list("outcome", flat=True)) == {"timed_out"}

    def test_retry_outside_the_queue_raises_the_error(self):
        with pytest.raises(KeyError):
            describe.retry(exc=KeyError("a"))
        with pytest.raises(KeyError):
            describe.retry(exc=KeyError)
        with pytest.raises(Retry):
            describe.retry()

    def test_retries_are_those_of_celery_by_default(self):
        task = pytest.importorskip("celery").Task
        ours = tells_delay.max_retries, tells_delay.celery.default_retry_delay
        assert ours == (task.max_retries, task.default_retry_delay) == (3, 180)

    def test_retry_waits_for_its_delay(self):
        tells_delay.delay(countdown=60)
        tells_delay.delay(eta=(datetime.now(timezone.utc) + timedelta(hours=1)).isoformat())
        tells_delay.delay()
        drain()

        assert {AsyncResult(str(job.pk)).state for job in Job.objects.all()} == {"RETRY"}
        now = datetime.now(timezone.utc)
        waits = [(job.run_after - now).total_seconds() for job in Job.objects.order_by("pk")]
        assert waits == pytest.approx([60, 3600, 180], abs=10)
        assert Execution.objects.first().error_type == "builtins.LookupError"

    def test_retry_that_is_past_runs_at_once_as_in_celery(self):
        by_countdown = tells_delay.delay(countdown=-5)
        by_eta = tells_delay.delay(eta=NOON.isoformat())
        drain()

        assert attempts(tells_delay) == 2 * (1 + tells_delay.max_retries)
        for result in (by_countdown, by_eta):
            with pytest.raises(TaskFailed, match="not there"):
                result.get()

    def test_naive_eta_of_retry_is_refused_as_that_of_a_call(self):
        result = tells_delay.delay(eta="2026-01-01T00:00:00")
        drain()

        with pytest.raises(TaskFailed, match=r"eta=.* is not served .* django.utils.timezone"):
            result.get()

    def test_error_that_ended_the_retries_of_a_job_is_retried_for_another(self):
        for task in (busy_once_more, always_busy):
            task.delay()
            run_all()

        assert (attempts(busy_once_more), attempts(always_busy)) == (2, 4)


@shared_task(bind=True)
def tells_delay(self, countdown=None, eta=None):
    eta = eta and datetime.fromisoformat(eta)
    self.retry(exc=LookupError("not there"), countdown=countdown, eta=eta)


BUSY = LookupError("an exception that is raised by several jobs")


@shared_task(bind=True, autoretry_for=(LookupError,), default_retry_delay=0)
def busy_once_more(self):
    self.retry(exc=BUSY, max_retries=1)


@shared_task(autoretry_for=(LookupError,), default_retry_delay=0)
def always_busy():
    raise BUSY


# Results


@pytest.mark.django_db
class TestResult:
    def test_failed_task_raises_its_error_as_text(self):
        result = fail.delay()
        drain()

        assert (result.state, result.failed(), result.successful()) == ("FAILURE", True, False)
        with pytest.raises(TaskFailed, match="ValueError: seven"):
            result.get(timeout=1)
        assert isinstance(result.result, TaskFailed)

    def test_waiting_task_has_no_result(self):
        result = add.delay(1, 2)

        assert (result.state, result.ready(), result.result) == ("PENDING", False, None)

    @pytest.mark.parametrize("id", ["01890000-0000-7000-8000-000000000000", "welcome-17", "", None])
    def test_unknown_id_is_pending(self, id):
        result = AsyncResult(id)
        result.revoke(terminate=True)

        assert (result.state, result.ready(), result.result) == ("PENDING", False, None)
        with pytest.raises(TaskResultDoesNotExist):
            result.get(timeout=1)

    def test_revoked_task_does_not_run(self):
        result = add.delay(1, 2)
        result.revoke()

        assert drain() == 0
        assert result.state == "REVOKED"
        with pytest.raises(TaskRevokedError):
            result.get()

    def test_results_of_a_group_are_in_its_order(self):
        results = group(add.s(1, 2), add.s(3, 4)).delay()
        assert not results.ready()
        drain()

        assert (results.ready(), results.successful(), results.get()) == (True, True, [3, 7])
        assert [each.get() for each in results] == [3, 7]


@pytest.mark.django_db(transaction=True)
def test_real_worker_runs_all_kinds_of_calls(worker):
    worker()
    lazy = chord((add.s(n, 1) | add_one.s() for n in range(4)), total.s(extra=100))

    assert add.delay(1, 2).get(LONG) == 3
    assert chain(add.s(1, 2), add_one.s()).delay().get(LONG) == 4
    assert lazy.delay().get(LONG) == 114
    assert (group(add.s(1, 1), add.s(2, 2)) | total.s()).delay().get(LONG) == 6


@shared_task
def add_one(number):
    return number + 1


@pytest.mark.django_db(transaction=True)
def test_running_task_is_stopped_by_terminate(worker):
    worker()
    result = wait_long.delay()
    until(lambda: result.state == "STARTED")

    result.revoke(terminate=True)

    assert until(lambda: result.ready() and result.state) == "REVOKED"


@shared_task
def wait_long():
    while True:
        pass


@pytest.mark.django_db(transaction=True)
def test_runqueue_runs_a_chord(runqueue):
    runqueue("--embedded", DBQUEUE_OPTIONS=f'{{"task_modules": ["{__name__}"]}}')

    assert chord([add.s(1, 2), add.s(3, 4)])(total.s(extra=1)).get(LONG) == 11


# Canvas


@pytest.mark.django_db
class TestChord:
    def test_body_runs_after_the_header_with_its_results(self):
        result = chord([add.s(1, 2), add.s(3, 4)])(total.s(extra=1))
        assert result.state == "PENDING"
        drain()

        assert (result.state, result.get(timeout=1)) == ("SUCCESS", 11)
        assert AsyncResult(result.id).state == "SUCCESS"

    def test_body_without_a_header_runs(self):
        result = chord([])(total.s())
        drain()

        assert result.get() == 0

    def test_immutable_body_gets_no_results(self):
        result = chord([add.s(1, 2)])(add.si(5, 5).set(queue="mail"))
        drain()

        assert result.get() == 10
        assert Job.objects.get(args=[5, 5]).queue == "mail"

    def test_body_starts_and_expires_at_its_times(self):
        eta = datetime.now(timezone.utc) + timedelta(hours=1)
        expires = eta + timedelta(minutes=5)
        result = chord([add.s(1, 2)])(total.s().set(eta=eta, expires=expires))
        drain()

        job = Job.objects.get(task=total.module_path)
        assert (job.run_after, job.expires_at) == (eta, expires)
        advance(hours=1, minutes=1)
        drain()
        assert result.get() == 3

    def test_body_may_run_and_expire_after_seconds(self):
        chord([add.s(1, 2)])(total.s().set(countdown=60, expires=90))
        drain()

        job = Job.objects.get(task=total.module_path)
        assert job.expires_at - job.run_after == timedelta(seconds=30)

    def test_body_does_not_run_after_a_failure(self):
        result = chord([add.s(1, 2), fail.s()])(total.s())
        run_all()

        assert result.state == "FAILURE"
        assert not Job.objects.filter(task=total.module_path).exists()
        with pytest.raises(TaskFailed, match="header was not successful"):
            result.get()

    def test_body_is_enqueued_once_if_its_job_runs_twice(self):
        chord([add.s(1, 2)])(total.s())
        drain()
        finish = Job.objects.get(task=finish_chord.module_path)

        Job.objects.filter(pk=finish.pk).update(state="ready", finished_at=None)
        drain()

        assert Job.objects.filter(task=total.module_path).count() == 1

    def test_get_ends_after_its_timeout(self):
        with pytest.raises(TimeoutError, match="has not ended within"):
            chord([add.s(1, 2)])(total.s()).get(timeout=0.1)

    def test_revoke_discards_the_header(self):
        result = chord([add.s(1, 2)])(total.s())
        result.revoke()

        assert drain() == 0
        assert Job.objects.get().state == "discarded"

    def test_body_that_does_not_take_the_results_is_refused(self):
        with pytest.raises(TypeError, match="too many positional arguments"):
            chord([add.s(1, 2)])(fail.s())
        assert not Job.objects.exists()

    def test_body_with_a_value_that_json_has_not_is_refused_by_name(self):
        with pytest.raises(TypeError, match=r"total\(\): argument 'extra': Unsupported type"):
            chord([add.s(1, 2)])(total.s(extra=object()))
        assert not Job.objects.exists()

    def test_body_with_a_naive_time_is_refused(self):
        with pytest.raises(InvalidTask, match="must be an aware datetime"):
            chord([add.s(1, 2)])(total.s().set(eta=datetime(2026, 1, 1)))
        assert not Job.objects.exists()


# Refused


def the_function():
    pass


async def coroutine():
    pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": dict}, r"base=<class 'dict'> is not served .* signal task_finished"),
        ({"serializer": "pickle"}, r"serializer='pickle' .* Arguments are JSON"),
        ({"priority": 3}, r"DBQUEUE_CELERY_BROKER is None: give 'rabbitmq'"),
        ({"priority": 10}, r"priority=10 .* from 0 to 9"),
        ({"rate_limit": "1/d"}, r"rate_limit='1/d' .* '100/m'"),
        ({"rate_limit": "0/s"}, r"rate_limit='0/s'"),
        ({"soft_time_limit": 60, "time_limit": 90}, r"OPTIONS\['timeout_grace'\] to 30"),
        ({"retry_kwargs": {"eta": 1}}, r"retry_kwargs\['eta'\]=1"),
        ({"reject_on_worker_lost": False}, r"give acks_late=False"),
        ({"on_success": print}, r"Use chain\(\)"),
        ({"pydantic": True}, r"pydantic=True .*model_dump"),
        ({"resultrepr_maxsize": 9}, r"resultrepr_maxsize=9 .* or use @task"),
        ({"queue": 5}, "queue_name"),
    ],
)
def test_option_of_the_decorator_that_is_not_served_is_refused(options, message):
    with pytest.raises((TypeError, InvalidTask), match=message):
        shared_task(**options)(the_function)


def test_coroutine_is_refused():
    with pytest.raises(TypeError, match="takes coroutines"):
        shared_task(coroutine)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task_id": "a"}, r"task_id='a' is not served .* makes the id"),
        ({"link": add.s(1)}, r"link=.* Use chain"),
        ({"link_error": add.s(1)}, r"link_error=.* task_finished"),
        ({"countdown": 1, "eta": NOON}, r"either countdown or eta"),
        ({"routing_key": "a.b"}, r"routing_key='a.b' .* queue="),
        ({"headers": {}}, r"metadata"),
        ({"countdown": 60, "expires": 30}, r"expires must be above 0"),
        ({"eta": datetime(2026, 1, 1)}, r"aware datetime"),
    ],
)
def test_option_of_a_call_that_is_not_served_is_refused(options, message):
    with pytest.raises((TypeError, InvalidTask), match=message):
        add.apply_async((1, 2), **options)
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: chain(add.s(1, 2), add.s(3)), r"args=\(\(3,\), {}\) .* write .s\(\)"),
        (lambda: chain(add.s(1, 2), add_one.si(3)), r"write .s\(\)"),
        (lambda: chain(add.s(1, 2), add_one.s().set(countdown=5)), r"countdown=5 .* first task"),
        (lambda: chain(add.s(1, 2), short_lived.s()), r"expires=600 .* first task"),
        (lambda: add.s(1, 2) | group(add_one.s()), r"For a group: chord\(\)"),
        (lambda: chain(add.s(1, 2), group(add_one.s())), r"For a group: chord\(\)"),
        (lambda: chain(add.s(1, 2), fail.s()).delay(), r"gets one argument"),
        (lambda: group(add), r"Give signatures of tasks"),
        (lambda: chord([add.s(1, 2)])(), r"body=None"),
        (lambda: add.request, r"Give @shared_task bind=True"),
        (lambda: crontab(day_of_week=1, day_of_month=1), r"'mon#1'"),
    ],
)
def test_canvas_that_is_not_served_is_refused(make, message):
    with pytest.raises((TypeError, InvalidTask), match=message):
        make()


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (add, "starmap"),
        (add.s(), "stamp"),
        (AsyncResult("a"), "forget"),
        (describe.request, "chord"),
    ],
)
def test_attribute_that_is_not_served_names_the_docs(found, name):
    with pytest.raises(AttributeError, match=rf"{name!r}.*docs/from_celery.md#refused"):
        getattr(found, name)


@pytest.mark.django_db
def test_retry_with_more_retries_than_the_task_is_refused():
    result = wants_more.delay()
    run_all()

    assert attempts(wants_more) == 1
    with pytest.raises(TaskFailed, match="Give it to @shared_task"):
        result.get()


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["args", "throw", "queue"])
def test_option_of_retry_that_is_not_served_is_refused(name):
    with pytest.raises(TypeError, match=f"{name}=False is not served"):
        describe.retry(**{name: False})


# Names that are not there


@pytest.mark.parametrize("name", ["current_task", "Celery", "TimeoutError", "solar", "task_prerun"])
def test_import_of_a_name_that_is_not_served_has_the_remedy(name):
    with pytest.raises(ImportError) as refused:
        exec(f"from django_dbqueue.contrib.celery import {name}")

    assert str(refused.value) == (
        f"cannot import name '{name}' from 'django_dbqueue.contrib.celery', which has a subset of "
        f"Celery. {MISSING[name]} See docs/from_celery.md#refused."
    )
    assert refused.value.name == "django_dbqueue.contrib.celery"


def test_other_names_are_those_of_any_module():
    assert not hasattr(shim, "nothing")
    assert not hasattr(shim, "__wrapped__")
    with pytest.raises(AttributeError, match="no attribute 'curent_task'"):
        _ = shim.curent_task
    with pytest.raises(ImportError, match="cannot import name 'curent_task'"):
        exec("from django_dbqueue.contrib.celery import curent_task")


def test_each_name_of_celery_is_served_or_refused_by_name():
    celery = pytest.importorskip("celery")
    from celery import canvas, exceptions, result, schedules, signals

    internals = {
        *("CDeprecationWarning", "CPendingDeprecationWarning", "CeleryCommandException"),
        *("DuplicateNodenameWarning", "DuplicateTaskNameWarning", "FixupWarning"),
        *("SecurityWarning", "reraise", "version_info", "version_info_t", "bugreport", "execute"),
        *("local", "log", "maybe_patch_concurrency", "messaging", "registry"),
    }
    names = {
        name
        for module in (celery, canvas, exceptions, result, schedules, signals)
        for name in module.__all__
        if not (name.startswith("_") or name.isupper())
    }
    assert names - internals - set(shim.__all__) - set(MISSING) == set()
    assert set(shim.__all__) & set(MISSING) == set()
    assert set(MISSING) - names == {
        *("app", "beat", "bootsteps", "exceptions", "result", "schedules", "signals", "utils"),
        *("get_task_logger", "import_modules", "states"),
    }


def refused_on_the_page():
    """Return the names in the table of the page that lists what is refused."""
    text = (Path(__file__).parent.parent / "docs" / "from_celery.md").read_text()
    _, found, rows = text.partition("\n| Refused | Instead |\n")
    assert found
    cells = [line.split("|")[1] for line in rows.partition("\n\n")[0].splitlines()]
    return {name for cell in cells for span in re.findall(r"`([^`]+)`", cell)
            for name in re.findall(r"\w+", span)}  # fmt: skip


def test_page_lists_each_option_with_a_remedy():
    assert set(REMEDIES) - refused_on_the_page() == set()


def test_page_lists_each_option_that_code_refuses():
    calls = [
        each
        for path in Path(shim.__file__).parent.glob("*.py")
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "refuse"
    ]
    literal = [each.args[1].value for each in calls if isinstance(each.args[1], ast.Constant)]
    names = {name for text in literal for name in text.split(", ")}
    assert {"eta", "body", "day_of_week"} <= names
    # A coroutine function, and what is not a signature.
    assert names - refused_on_the_page() == {"function", "task"}


@pytest.mark.parametrize("name", sorted(REMEDIES.keys() & NEED_NOTHING.keys()))
def test_option_whose_other_value_is_refused_is_accepted(name):
    accepted = NEED_NOTHING[name][0]
    assert shared_task(**{name: accepted})(the_function).on_lost == "retry"
    with pytest.raises(TypeError, match=re.escape(REMEDIES[name])):
        shared_task(**{name: "other"})(the_function)


def test_task_that_is_retried_with_its_worker_lost_is_so_with_early_acknowledgement():
    assert shared_task(acks_late=False)(the_function).on_lost == "fail"
    both = shared_task(acks_late=False, retry_on_worker_lost=True)(the_function)
    assert both.on_lost == "retry"


def test_result_of_a_backend_without_jobs_is_refused(settings):
    settings.TASKS = IMMEDIATE
    with pytest.raises(TypeError, match="ImmediateBackend, whose results cannot be read by an id"):
        _ = AsyncResult("a").state


def test_settings_may_import_the_package(tmp_path):
    """Settings of a project with Celery import crontab(), before TASKS can be read."""
    (tmp_path / "early_settings.py").write_text(
        "from django_dbqueue.contrib.celery import crontab\n"
        "INSTALLED_APPS = ['django_dbqueue']\n"
        "BACKEND = 'django_dbqueue.backend.DatabaseBackend'\n"
        "TASKS = {'default': {'BACKEND': BACKEND, 'OPTIONS': {'recurring': {\n"
        "    'nightly': {'command': 'clearsessions', 'cron': crontab(minute=30, hour=3)}}}}}\n"
    )
    code = (
        "import django; django.setup()\n"
        "from django_dbqueue.compat import task_backends\n"
        "print(task_backends['default'].options['recurring']['nightly']['cron'])\n"
        "from django_dbqueue.contrib.celery import canvas\n"
        "print(canvas.finish_chord.backend, hasattr(canvas, 'finish'))"
    )
    paths = [str(tmp_path), str(Path(__file__).parent.parent), *sys.path]
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "early_settings",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LONG
    )
    assert (found.stdout, found.stderr) == ("30 3 * * *\ndefault False\n", "")


# The check of settings


IMMEDIATE = {"default": {"BACKEND": f"{FRAMEWORK}.backends.immediate.ImmediateBackend"}}


def eager_warnings():
    found = run_checks(tags=["dbqueue_recurring"])
    return [each.msg for each in found if each.id == "dbqueue.W007"]


class TestEager:
    @pytest.fixture
    def without_celery(self, monkeypatch):
        """Hide the app of other tests."""
        monkeypatch.delitem(sys.modules, "celery._state", raising=False)

    @pytest.mark.parametrize("name", ["CELERY_TASK_ALWAYS_EAGER", "CELERY_ALWAYS_EAGER"])
    def test_setting_is_reported(self, settings, name):
        setattr(settings, name, True)

        (found,) = eager_warnings()
        assert found.startswith(f"{name} is true, and does not apply to tasks of django_dbqueue")

    @pytest.mark.usefixtures("without_celery")
    def test_setting_that_is_false_is_not_reported(self, settings):
        settings.CELERY_TASK_ALWAYS_EAGER = False

        assert eager_warnings() == []

    def test_setting_without_the_shim_is_not_reported(self, settings, monkeypatch):
        settings.CELERY_TASK_ALWAYS_EAGER = True
        monkeypatch.delitem(sys.modules, "django_dbqueue.contrib.celery")

        assert eager_warnings() == []

    def test_setting_with_a_backend_that_runs_at_once_is_not_reported(self, settings):
        settings.CELERY_TASK_ALWAYS_EAGER = True
        settings.TASKS = IMMEDIATE

        assert eager_warnings() == []

    def test_configuration_of_an_app_is_reported(self, original):
        (found,) = eager_warnings()
        assert found.startswith(
            "task_always_eager of the Celery app 'celery_project_original' is true"
        )

    def test_invalid_configuration_of_an_app_is_left_to_celery(self):
        celery = pytest.importorskip("celery")
        app = celery.Celery("odd", config_source="no_such_module", set_as_current=False)
        try:
            assert [each for each in eager_warnings() if "'odd'" in each] == []
        finally:
            app.close()


def test_last_retry_without_exc_has_the_name_of_celery():
    assert MaxRetriesExceededError.__name__ == "MaxRetriesExceededError"
