"""The queue's own connections to PostgreSQL read the times that Django's read."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone

import pytest
from django.db import DataError, connection, connections
from django.utils.timezone import get_fixed_timezone

from django_dbqueue.runtime.connections import close_connections, prepare

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="a loader of psycopg"),
]

TIMES = [
    "2026-11-28 22:57:49.123456+00",
    "2026-11-28 22:57:49+05:45",
    "1000-01-01 00:00:00.000001+00",
    "9999-12-31 23:59:59.999999+00",
]


def read(*times: str) -> list[datetime]:
    columns = ", ".join(["%s::timestamptz"] * len(times))
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {columns}", times)
        return list(cursor.fetchone())


def on_prepared_thread(step):
    """Return the result of the step on a thread with the queue's own connection, or its error."""
    found = []

    def run():
        prepare("default", 10.0)
        try:
            found.append(step())
        except Exception as error:
            found.append(error)
        finally:
            close_connections()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def loader():
    adapters = connection.cursor().connection.adapters
    return adapters.get_loader(adapters.types["timestamptz"].oid, 0).__module__


def test_times_are_those_that_django_reads():
    assert loader().startswith("django.")
    assert on_prepared_thread(loader) == "django_dbqueue.runtime.time_loader"

    times = on_prepared_thread(lambda: read(*TIMES))

    assert times == read(*TIMES)
    assert {time.tzinfo for time in times} == {timezone.utc}
    assert times[1] == datetime(
        2026, 11, 28, 22, 57, 49, tzinfo=timezone(timedelta(hours=5, minutes=45))
    )


@pytest.mark.parametrize("time", ["infinity", "-infinity", "20000-01-01", "0044-03-15 BC"])
def test_time_that_python_does_not_have_is_an_error(time):
    assert isinstance(on_prepared_thread(lambda: read(time)), DataError)


@pytest.mark.parametrize(
    ("use_tz", "zone"), [(True, "Asia/Kathmandu"), (False, "Asia/Kathmandu"), (False, "UTC")]
)
def test_other_time_zones_are_left_to_django(settings, monkeypatch, use_tz, zone):
    settings.USE_TZ, settings.TIME_ZONE = use_tz, "UTC"
    monkeypatch.setitem(connections.settings["default"], "TIME_ZONE", zone if use_tz else None)

    def step():
        return loader(), read(TIMES[0])[0]

    of_loader, time = on_prepared_thread(step)

    assert of_loader.startswith("django.")
    assert (time.utcoffset() if use_tz else time.tzinfo) == (
        get_fixed_timezone(345).utcoffset(None) if use_tz else None
    )
