"""Tasks that write a line for each run: the version, the task, and the time."""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import django_dbqueue
from django_dbqueue import batch, limit, pipeline, recurring, task

CODE = os.environ["UPGRADE_CODE"]
FOLDER = Path(os.environ["UPGRADE_FOLDER"])
assert Path(django_dbqueue.__file__).is_relative_to(os.environ["UPGRADE_ROOT"]), (
    django_dbqueue.__file__
)


def mark(what, name, began=None):
    line = json.dumps(
        {"code": CODE, "what": what, "name": name, "began": began, "ended": time.monotonic()}
    )
    with open(FOLDER / "marks", "a") as file:  # A short line is appended whole.
        file.write(f"{line}\n")


@task
def plain(name):
    time.sleep(0.02)
    mark("plain", name)


@task
async def coroutine(name):
    mark("coroutine", name)


@task(atomic=True)
def atomic(name):
    mark("atomic", name)


@task(key=lambda name: name, max_attempts=2, timeout=60)
def keyed(name):
    mark("keyed", name)


@task(concurrency=limit(2, group="two"))
def limited(name):
    began = time.monotonic()
    time.sleep(0.02)
    mark("limited", name, began)


@task
def fails(name):
    mark("fails", name)
    raise ZeroDivisionError("This is meant.")


@task
def first(name):
    mark("first", name)
    return name


@task
def second(name):
    mark("second", name)


@task
def finished(batch_id):
    mark("finished", batch_id)


@task
def held(name):
    """Run until the file ``go`` exists."""
    mark("holds", name)
    while not (FOLDER / "go").exists():
        time.sleep(0.05)
    mark("held", name)


def last(name):
    """Run until the file of its group exists."""
    mark("began", name)
    while not (FOLDER / name.partition(".")[0]).exists():
        time.sleep(0.02)
    mark("ended", name)


@task
def lasting(name):
    last(name)


@task(on_lost="fail")
def lasting_once(name):
    last(name)


@task(key=lambda name: name)
def lasting_keyed(name):
    last(name)


@task(concurrency=limit(1, group="one"))
def lasting_limited(name):
    last(name)


@recurring(every=timedelta(seconds=1))
@task
def tick():
    mark("tick", "")


def fill(name, number):
    """Enqueue jobs of every kind."""
    plain.enqueue_many([(f"{name}.{each}",) for each in range(number)])
    limited.enqueue_many([(f"{name}.{each}",) for each in range(number // 4)])
    pipeline(first, second).enqueue_many([(f"{name}.{each}",) for each in range(number // 10)])
    plain.using(run_after=timedelta(seconds=1)).enqueue(f"{name}.later")
    for each in (coroutine, atomic, fails, keyed):
        each.enqueue(name)
    keyed.enqueue("everybody")
    with batch(on_finish=finished):
        plain.enqueue(f"{name}.member")


def fill_with_lasting(group):
    """Enqueue seven jobs that start together, and one that waits for a slot."""
    lasting.enqueue(f"{group}.plain")
    lasting_once.enqueue(f"{group}.once")
    lasting_keyed.enqueue(f"{group}.keyed")
    lasting_limited.enqueue_many([(f"{group}.limited",), (f"{group}.waiting",)])
    pipeline(first, lasting).enqueue(f"{group}.stage")
    with batch(on_finish=finished):
        lasting.enqueue_many([(f"{group}.member",), (f"{group}.another",)])
