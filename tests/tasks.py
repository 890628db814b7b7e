"""Tasks for the tests, well behaved and not."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from contextvars import ContextVar

from asgiref.sync import sync_to_async
from django.core.cache import caches
from django.core.exceptions import SuspiciousOperation
from django.db import Error, connection, connections, transaction
from django.utils import translation

from django_dbqueue import Constant, FanOut, Finish, GoTo, Interrupted, Rate, limit, task
from django_dbqueue.compat import task_backends
from django_dbqueue.models.expressions import Now

from . import timely
from .models import Effect, Interval, Run


@task
def nothing():
    pass


@task
def add(a, b=0):
    return a + b


@task
def with_mutable_defaults(a, options={}, names=[]):  # noqa: B006
    return a


@task(takes_context=True)
def sign_in_many(context, name, /, *passwords, region="", **credentials):
    pass


@task(takes_context=True)
def sign_in(context, name, password, headers, token=""):
    return {"access_token": token}


@task(takes_context=True)
def record(context):
    """Insert a row that must be unique."""
    Run.objects.create(job=context.task_result.id)


@task(takes_context=True)
def leave_line(context, path, until="", seconds=0.0, ended=""):
    """Write a line to a file, wait for another file, and write a line to a third."""
    _write_line(context, path)
    while until and not os.path.exists(until):
        time.sleep(0.02)
    time.sleep(seconds)
    if ended:
        _write_line(context, ended)


def _write_line(context, path):
    with open(path, "a") as file:
        file.write(f"{context.task_result.id} {context.attempt}\n")


@task(takes_context=True)
def count_until(context, path, until):
    """Query the database, over a new connection if one is lost, until a file exists."""
    leave_line.func(context, path)
    while not os.path.exists(until):
        try:
            Run.objects.count()
        except Error:
            connection.close()
        time.sleep(0.05)


@task(atomic=True)
def hold_transaction(seconds):
    Run.objects.count()
    time.sleep(seconds)


@task
def row(name):
    Run.objects.create(job=name)


@task
async def row_async(name):
    await Run.objects.acreate(job=name)


@task(timeout=2)
def sleep_too_long(seconds):
    time.sleep(seconds)


@task(timeout=2)
def count_too_long():
    """Compute in C code that holds the GIL."""
    return sum(range(10**12))


@task(timeout=2)
def loop_for(seconds):
    for _ in range(int(seconds * 100)):
        time.sleep(0.01)


@task
def hold_the_interpreter(seconds):
    """Sleep in C code that holds the GIL."""
    ctypes.PyDLL(None).usleep(seconds * 1_000_000)


@task(timeout=2)
def loop_too_long():
    Run.objects.create(job="begun")
    try:
        while True:
            time.sleep(0.01)
    finally:
        Run.objects.create(job="cleared up")


@task(timeout=2)
async def wait_too_long():
    try:
        await asyncio.sleep(3600)
    finally:
        await Run.objects.acreate(job="cleared up")


@task(timeout=2)
async def block_too_long():
    time.sleep(3600)


@task
def begin():
    """Begin a transaction without Django's knowledge, and leave it open."""
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")


@task
async def exit_beside():
    async def leave():
        raise SystemExit(3)

    await asyncio.gather(leave())


@task
async def echo(value, wait=0.0):
    await asyncio.sleep(wait)
    return value


@task
async def hold_the_database_thread(seconds):
    await sync_to_async(time.sleep)(seconds)


@task(timeout=2, max_attempts=1)
async def end_soon(name, wait):
    await asyncio.sleep(wait)
    return name


@task
async def fail_async():
    raise ValueError("async failure")


@task
def sleep(seconds):
    time.sleep(seconds)


@task
def tell_and_sleep(seconds):
    """Record the start, and sleep."""
    Run.objects.create(job="begun")
    time.sleep(seconds)


@task(max_attempts=2, timeout=9, on_lost="fail")
def fail_at_its_own_pace():
    raise ValueError


@task(timeout=0.1)
def spin_for_a_second():
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass


@task(timeout=0.1)
async def sleep_for_a_minute_async():
    for _ in range(600):
        await asyncio.sleep(0.1)


@task
async def break_event_loop():
    asyncio.get_running_loop()._selector.close()


@task
def fail(message="it failed"):
    raise ValueError(message)


@task
def fail_without_text():
    raise timely.NoText


@task(max_attempts=3, backoff=Constant(delay=0, jitter=0))
def fail_thrice():
    raise ValueError("again")


@task(max_attempts=5, backoff=Constant(delay=0), takes_context=True)
def succeed_at_third(context):
    if context.attempt < 3:
        raise ValueError("not yet")
    return context.attempt


@task(max_attempts=5, backoff=Constant(delay=60, jitter=0))
def fail_and_wait():
    raise ValueError("later")


@task(max_attempts=5, backoff=lambda error, result: 1e300)
def fail_and_wait_for_ever():
    raise ValueError("much later")


@task
def count_queries():
    Run.objects.count()
    return len(connection.queries)


@task(max_attempts=5, backoff=lambda error, result: 1 / 0)
def fail_with_broken_backoff():
    raise ValueError("with a broken backoff")


@task(max_attempts=5, backoff=lambda error, result: None)
def fail_with_refusing_backoff():
    raise ValueError("that is it")


@task(max_attempts=5, retry_on=(ConnectionError,), backoff=Constant(delay=0))
def retry_only_connections(kind):
    raise {"connection": ConnectionResetError, "value": ValueError}[kind](kind)


@task(discard_on=(FileNotFoundError,), max_attempts=5)
def discard_when_gone():
    raise FileNotFoundError("gone")


class Unreadable(BaseException):
    def __getattribute__(self, name):
        raise RuntimeError(name)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Unrepresentable(BaseException):
    def __str__(self):
        raise SystemExit(9)

    __repr__ = __str__


@task
def misbehave(how):
    """Raise, return or leave behind something that a worker must survive."""
    match how:
        case "exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "memory":
            raise MemoryError
        case "generator exit":
            raise GeneratorExit
        case "recursion":
            return misbehave.func(how)
        case "unspeakable":
            raise Unspeakable
        case "unrepresentable":
            raise Unrepresentable
        case "unreadable":
            raise Unreadable
        case "nul in type":
            raise type("Odd", (Exception,), {"__module__": "a\x00b"})
        case "surrogate in file name":
            exec(compile("raise ValueError", "/srv/\udcff.py", "exec"))
        case "nul":
            raise ValueError("a \x00 and a \ud800 in the message")
        case "long":
            raise ValueError("x" * 5_000_000)
        case "group":
            raise ExceptionGroup("several", [ValueError(1), TypeError(2)])  # noqa: F821
        case "stop iteration":
            raise StopIteration
        case "not json":
            return object()
        case "nan":
            return float("nan")
        case "nul result":
            return "\x00"
        case "circular":
            value = []
            value.append(value)
            return value
        case "open transaction":
            transaction.atomic().__enter__()
            Run.objects.create(job="never committed")
        case "broken transaction":
            transaction.atomic().__enter__()
            connection.cursor().execute("SELECT nonsense FROM nowhere")
        case "autocommit off":
            transaction.set_autocommit(False)
            Run.objects.create(job="never committed either")
        case "transaction by SQL":
            connection.cursor().execute(
                "SET autocommit = 0" if connection.vendor == "mysql" else "BEGIN"
            )
            Run.objects.create(job="never committed by SQL")
        case "closed connection":
            connection.ensure_connection()
            connection.connection.close()
        case "signal handler":
            signal.raise_signal(0) if False else None
            raise OSError("signal")


@task
def die(how="kill", after=0.0):
    time.sleep(after)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if isinstance(how, int):
        os._exit(how)
    ctypes.string_at(0)


@task(takes_context=True)
def count_to(context, end):
    """Continue from the metadata of the previous attempt."""
    for number in range(context.metadata.get("done", 0), end):
        Run.objects.create(job=f"{context.task_result.id} {number}")
        context.metadata["done"] = number + 1
        context.save_metadata()
        if context.should_stop:
            raise Interrupted
        time.sleep(0.05)
    return end


@task
def loop():
    Run.objects.create(job="begun in a loop")
    try:
        while True:
            time.sleep(0.01)
    finally:
        Run.objects.create(job="cleared up after the loop")


@task
async def wait():
    await Run.objects.acreate(job="begun to wait")
    try:
        await asyncio.sleep(3600)
    finally:
        await Run.objects.acreate(job="cleared up after the wait")


@task(on_lost="fail")
def transfer(name):
    """Must not run twice."""
    Run.objects.create(job=f"transfer {name}")
    time.sleep(0.7)


@task
def hang_the_claim_loop(seconds):
    from django_dbqueue.runtime.worker.claimer import Claimer

    Claimer.claim = lambda *args: time.sleep(3600)
    time.sleep(seconds)


@task(atomic=True)
def atomic_left_open(fails):
    for _ in range(2):
        transaction.atomic().__enter__()
    Run.objects.create(job="left open")
    return 1 / 0 if fails else None


@task(atomic=True)
def atomic_row(name, fail=False, result=None):
    Run.objects.create(job=name)
    if fail:
        raise ValueError("after the row")
    return float("nan") if result == "not JSON" else f"done: {name}"


tenant: ContextVar[str] = ContextVar("tenant", default="")


@task
def handle_for_tenant(name):
    """Return what the previous job on the thread has left, and the thread's connections."""
    before = [tenant.get(), translation.get_language()]
    tenant.set(name)
    translation.activate("de")
    shared = [connections["default"], caches["default"], task_backends["default"]]
    return [*before, threading.get_ident(), *map(id, shared)]


@task
async def cancel_all_others():
    for each in asyncio.all_tasks() - {asyncio.current_task()}:
        each.cancel()


@task
def start_method():
    return multiprocessing.get_start_method()


@task(atomic=True)
def fork_in_transaction():
    """Return the exit code of a child that fails, or None if it has not ended."""
    Run.objects.create(job="before")
    if not (child := os.fork()):
        os.execvp("no-such-program", ["no-such-program"])
    end = time.monotonic() + 15
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)
    Run.objects.create(job="after")
    return os.waitstatus_to_exitcode(ended[1])


@task(atomic=True)
def atomic_under_snapshot(name):
    with connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT count(*) FROM tests_run")
    Run.objects.create(job=name)
    meanwhile()


@task(atomic=True)
def atomic_change(name):
    Effect.objects.update(attempt=1)
    meanwhile()


def meanwhile():
    """Hook of a test, called while the task runs."""


@task(atomic=True)
def atomic_with_hook(name, fail=False):
    Run.objects.create(job=name)
    transaction.on_commit(_raise_in_hook)
    if fail:
        raise ValueError("after the row")


def _raise_in_hook():
    raise RuntimeError("the mail server is away")


@task(delete_on_success=True)
def leave_no_trace(fail=False):
    if fail:
        raise ValueError("of this, all is kept")


@task
def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


@task
def wrong_clock(seconds):
    """Set the clock of the worker's host wrong from now on."""
    right = time.time
    time.time = lambda: right() + seconds


@task
def say(length):
    return "x" * length


@task
def fail_unpicklably():
    raise SuspiciousOperation("it holds a lock", threading.Lock())


@task
def begin_and_sleep(name, seconds):
    Run.objects.create(job=name)
    time.sleep(seconds)


@task(on_lost="fail")
def transfer_slowly():
    Run.objects.create(job="begun")
    time.sleep(60)


@task(on_lost="fail", max_attempts=5)
def transfer_in_a_loop():
    Run.objects.create(job="begun")
    while True:
        time.sleep(0.01)


@task
def nap_for_ever():
    while True:
        time.sleep(0.01)


@task
def count_rows():
    return Run.objects.count()


@task(key=lambda name, seconds: name)
def wait_with_key(name, seconds):
    time.sleep(seconds)


@task(key=lambda number: number)
def index_document(number, text=""):
    return text


@task(key=lambda number: number, version=lambda version: version)
def add_newest(number, version):
    return number


@task(key=lambda name: name)
def leave_version(name, version):
    Effect.objects.create(job=name, attempt=version)


@task(concurrency=limit(2, key=lambda account: account))
def charge(account, amount=0):
    return amount


@task(concurrency=limit(1), takes_context=True)
def one_at_a_time(context, seconds=0.0):
    time.sleep(seconds)


@task(concurrency=limit(1, group="scanner", on_conflict="discard"))
def scan(what="all"):
    return what


@task(concurrency=(limit(1, key=lambda account: account), limit(2)))
def report(account):
    return account


@task(concurrency=(limit(1, key=lambda account: account), limit(3, group="bank")))
def withdraw(account):
    return account


@task(
    concurrency=(
        limit(1, key=lambda source: source, group="accounts"),
        limit(1, key=lambda target: target, group="accounts"),
    )
)
def move_money(source, target):
    return source, target


@task(concurrency=limit(2, group="bank"))
def deposit(account):
    return account


@task(concurrency=limit(2, group="rate bank"), rate=Rate(2, per=3600, group="bank", burst=2))
def audit():
    return "all is well"


@task(rate=Rate(10, per=60))
def call_service(number=0):
    return number


@task(rate=Rate(50, per=1, group="burst", burst=10), takes_context=True)
def call_often(context, number=0):
    Interval.objects.create(key="call", job=context.task_result.id)


@task(rate=Rate(1, per=3600))
def call_once_an_hour():
    pass


@task(concurrency=limit(2, key=lambda key: key), takes_context=True)
def occupy(context, key, seconds):
    interval = Interval.objects.create(key=key, job=context.task_result.id)
    time.sleep(seconds)
    Interval.objects.filter(pk=interval.pk).update(ended_at=Now())


@task(concurrency=limit(1, key=lambda key: key), takes_context=True)
def occupy_alone(context, key, seconds):
    occupy.func(context, key, seconds)


@task(concurrency=limit(2, key=lambda key: key), takes_context=True)
async def occupy_async(context, key, seconds):
    interval = await Interval.objects.acreate(key=key, job=context.task_result.id)
    await asyncio.sleep(seconds)
    await Interval.objects.filter(pk=interval.pk).aupdate(ended_at=Now())


@task(concurrency=limit(2, key=lambda key: key))
def nap(key, seconds):
    time.sleep(seconds)


@task
def grind(beans):
    return f"ground {beans}"


@task(max_attempts=3)
def brew(powder):
    return f"brewed {powder}"


@task
def pour(liquid):
    return f"poured {liquid}"


@task(takes_context=True)
def taste(context, liquid):
    return {"attempt": context.attempt, "stage": context.job.stage}


@task
def sort_out(what):
    match what:
        case "finish":
            return Finish("finished")
        case "go to":
            return GoTo(pour, "straight")
        case "ground again":
            return GoTo(grind, "once more")
        case "fan out":
            return FanOut(["a", "b"])
    return what


@task
def sum_up(batch):
    Run.objects.create(job=batch)


@task
def rejoice(batch):
    Run.objects.create(job=f"{batch} well")


@task(takes_context=True)
def spread(context, depth):
    if depth:
        with context.batch:
            spread.enqueue_many([(depth - 1,), (depth - 1,)])


@task(takes_context=True, max_attempts=2)
def add_and_fail_once(context):
    """Add a job to its batch, then fail at the first attempt, inside the block."""
    with context.batch:
        add.enqueue(1)
        if context.attempt == 1:
            raise ZeroDivisionError


@task
async def cancel_for_ever(value, after_end):
    """Cancel its asyncio task at each turn of the loop: from now on, or from its end on."""
    loop, own = asyncio.get_running_loop(), asyncio.current_task()

    def cancel():
        if not own.done():
            own.cancel()
            loop.call_soon(cancel)

    if after_end:
        cancel()
        return value
    loop.call_soon(cancel)
    await asyncio.sleep(3600)


@task
def echo_text(text, wait=0.0):
    time.sleep(wait)


@task(timeout=0.5)
def query_too_long(seconds):
    """Mostly wait for a reply of the database, without a transaction, as tasks do by default."""
    sql = {"postgresql": f"SELECT pg_sleep({seconds})", "mysql": f"SELECT SLEEP({seconds})"}[
        connection.vendor
    ]
    while True:
        with connection.cursor() as cursor:
            cursor.execute(sql)
            cursor.fetchall()


@task(atomic=True)
def count_up():
    """Read, then write. Lock the row where the database would allow a lost update."""
    rows = Run.objects.all()
    if connection.vendor == "mysql" and connection.isolation_level == "repeatable read":
        rows = rows.select_for_update()
    (number,) = rows.values_list("job", flat=True)
    time.sleep(0.02)
    Run.objects.update(job=str(int(number) + 1))


@task
def ask_for_one_key(number):
    for _ in range(5):
        nothing.using(key="one").enqueue()
