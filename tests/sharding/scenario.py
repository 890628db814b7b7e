"""The steps of the project. On request, the parent process kills the second server, and starts it again."""

import subprocess
import sys
from datetime import timedelta

import django

django.setup()

from django.contrib.auth.models import User  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import OperationalError, connections  # noqa: E402
from django.test import Client  # noqa: E402
from django.test.utils import setup_test_environment  # noqa: E402

from django_dbqueue.models import Job  # noqa: E402
from tests.conftest import until  # noqa: E402
from tests.sharding.tasks import SHARDS, enqueue_bill, shard_of  # noqa: E402

CUSTOMERS, DATABASES = range(20), {"default": "queue_0", "shard_1": "queue_1"}


def ask(parent: str) -> None:
    print(parent, flush=True)
    sys.stdin.readline()


def customers_in(backend):
    rows = Job.objects.using(DATABASES[backend])
    return set(rows.values_list("metadata__customer", flat=True))


def of(backend):
    return {customer for customer in CUSTOMERS if shard_of(customer) == backend}


def ended(results):
    return all(result.refresh() or result.is_finished for result in results)


setup_test_environment()
call_command("migrate", verbosity=0)

# Each customer's jobs are in one database.
results = [enqueue_bill(customer, order) for customer in CUSTOMERS for order in range(3)]
assert {backend: customers_in(backend) for backend in SHARDS} == {
    backend: of(backend) for backend in SHARDS
}
assert all(map(of, SHARDS))

# One runqueue runs them all.
child = subprocess.Popen([sys.executable, "-m", "django", "runqueue", "--backend", "all"])
try:
    until(lambda: ended(results))
    assert [result.return_value for result in results] == [
        [customer, order] for customer in CUSTOMERS for order in range(3)
    ]

    # One admin shows them, one backend at a time.
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    for backend, database in DATABASES.items():
        page = client.get("/admin/dbqueue/job/", {"backend": backend})
        shown = {str(job.pk) for job in page.context["cl"].result_list}
        assert shown == set(map(str, Job.objects.using(database).values_list("pk", flat=True)))

    # While one server is down, the jobs of the other server's customers run.
    ask("kill")
    connections["queue_1"].close()
    meanwhile = [enqueue_bill(customer, 4) for customer in of("default")]
    until(lambda: ended(meanwhile))
    try:
        enqueue_bill(min(of("shard_1")), 4)
    except OperationalError:
        connections["queue_1"].close()
    else:
        raise AssertionError("The second server is up.")
    ask("start")
    later = [enqueue_bill(customer, 5) for customer in of("shard_1")]
    until(lambda: ended(later))

    # All of one shard move to the other.
    waiting = [enqueue_bill(customer, 6, timedelta(hours=1)) for customer in of("default")]
    call_command("queue", "move", "--backend", "default", "--to", "shard_1", "--all")
    moved = Job.objects.using("queue_1").filter(pk__in=[result.id for result in waiting])
    assert moved.run_now() == len(waiting)
    until(lambda: moved.filter(state="successful").count() == len(waiting))
finally:
    child.terminate()
    assert child.wait(120) == 0
