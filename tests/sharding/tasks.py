from datetime import timedelta
from zlib import crc32

from django_dbqueue import limit, task

SHARDS = ["default", "shard_1"]


def shard_of(customer):
    return SHARDS[crc32(str(customer).encode()) % len(SHARDS)]


@task(concurrency=limit(1, key=lambda customer, order: str(customer)))
def bill(customer, order):
    return [customer, order]


def enqueue_bill(customer, order, delay=timedelta()):
    return bill.using(
        backend=shard_of(customer), metadata={"customer": customer}, run_after=delay or None
    ).enqueue(customer, order)
