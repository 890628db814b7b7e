"""The cost of each page at 10,000 and at a million jobs: its statements, and the rows that they read.

Run with ``-s`` for a table of all pages.
"""

from __future__ import annotations

import html
import math
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import pytest
from django.apps import apps
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.models import Model
from django.test import Client
from django.test.utils import CaptureQueriesContext

from django_dbqueue.admin.windows import SIZE
from django_dbqueue.models import Batch, Failure, Job, Operation, RecurringTask
from django_dbqueue.models.enums import State
from tests.flush import flush

from .conftest import a_client
from .many_jobs import fill
from .test_permissions import PAGES, url

FEW, MANY = 10_000, 1_000_000
# The statements of a page itself; Django reads its session and its user with two more.
LIST, DETAIL, SESSION = 8, 12, 2
OTHER_PAGES = ("overview", "databasehealth")
# The rows that a statement may read: a window, and one more to see that there are others.
MOST_ROWS = SIZE + 1
# The attempts of a failure and the jobs of the window are read in one statement.
MORE_ROWS = dict.fromkeys(("job?failure=", "job?failure=&state=failed"), SIZE)
# Not bounded: all jobs in a state. See docs/decisions/0026-windows.md.
READ_ALL = {
    *(f"job?queue=&state={state}" for state in ("blocked", "failed", "scheduled")),
    "job?state=ready&task=",
}
# Parameters with few values, each of which has another plan.
FEW_VALUES = {
    *("state", "attempts", "enqueued", "ended", "hours", "order", "finished", "which"),
    *("calendar", "kind__exact", "is_enabled__exact", "is_from_code__exact"),
}
# Searches, and filters that find little: an index cannot end the search early.
SEARCHES = (
    "?queue=rare",
    "?queue=rare&state=failed",
    "?state=ready&task=shop.tasks.rare",
    "?enqueued=720&queue=rare",
    "?attempts=again&queue=rare",
    "?release=none",
    "?worker=none",
    "?source=command:none",
    "?q=queue:rare",
    "?q=task:shop.tasks.rare",
    "?q=key:key_50",
    "?q=request:17",
    "?q=rare",
    "?q=abcdef0123",
)

pytestmark = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="Rows are generated and counted by PostgreSQL."
)


class Cost(NamedTuple):
    statements: list[str]
    milliseconds: float


@pytest.mark.timeout(900)  # A busy machine inserts them slowly.
@pytest.mark.django_db(transaction=True)
def test_pages_cost_no_more_with_a_million_jobs() -> None:
    ContentType.objects.get_for_models(*apps.get_models())
    fill(FEW)
    few = costs(a_client("root", [], is_superuser=True))
    flush("default")
    fill(MANY)
    many = costs(a_client("root", [], is_superuser=True))
    read = {page: max(map(rows_read, cost.statements)) for page, cost in many.items()}

    for page, cost in sorted(many.items(), key=lambda it: -it[1].milliseconds):
        before = few.get(page)
        shown = (*(before or ("", 0)), *cost)
        print(
            f"{page:40} {len(shown[0]):4} {shown[1]:7.0f} ms {len(shown[2]):4} {shown[3]:7.0f} ms {read[page]:9} rows"
        )
    counted = {
        page: len(cost.statements)
        for page, cost in many.items()
        if page.split("?")[0] not in OTHER_PAGES
    }
    grown = {page: (len(few[page].statements), n) for page, n in counted.items() if page in few}
    assert {page: n for page, n in counted.items() if n > most_statements(page)} == {}
    assert {page: numbers for page, numbers in grown.items() if len({*numbers}) > 1} == {}
    assert {page: read[page] for page in counted if read[page] > most_rows(page)} == {}


def most_statements(page: str) -> int:
    """Return the number of statements that a page may take."""
    return (DETAIL if ": " in page.partition("?")[0] else LIST) + SESSION


def most_rows(page: str) -> float:
    """Return the number of rows that a statement of a page may read."""
    return math.inf if page in READ_ALL else MOST_ROWS + MORE_ROWS.get(page, 0)


def costs(client: Client) -> dict[str, Cost]:
    """Open all pages, and each kind of link from them to a list once."""
    pages = {page: url(page) for page in (*PAGES, *OTHER_PAGES)}
    pages |= {kind_of(url("job") + query): url("job") + query for query in SEARCHES}
    pages |= {
        f"{page}?q=": url(page) + "?q=nothing"
        for page in PAGES
        if page not in ("job", "hangedjob", "process")
    }
    pages |= dict(rows())
    found, todo = {}, list(pages.items())
    for page, address in todo:
        found[page], text = cost_of(client, address)
        for link in links(address, text) if "?" not in address else ():
            if (kind := kind_of(link)) not in pages:
                pages[kind] = link
                todo.append((kind, link))
    return found


def rows() -> Iterator[tuple[str, str]]:
    """Yield the page of a row of each model, and of a job in each state."""
    jobs = Job.objects.filter(limits__isnull=True).order_by("-pk")
    for state in State:
        yield f"job: {state}", url("job", "change", jobs.filter(state=state)[0].pk)
    limited = Job.objects.filter(limits__isnull=False).order_by("-pk")
    yield "job: blocked by a limit", url("job", "change", limited.filter(state="blocked")[0].pk)
    failures = {"most frequent": 1, "usual": 6, "without attempts": 7}
    assert not Failure.objects.filter(pk=7, executions__isnull=False).exists()
    for name, pk in failures.items():
        yield f"failure: {name}", url("failure", "change", pk)
    of: dict[str, Any] = {
        "queue": "queue_1",
        "taskstate": "shop.tasks.task_1",
        "process": 1,
        "semaphore": "saturated",
        "batch": Batch.objects.order_by("-pk")[1],
        "recurringtask": RecurringTask.objects.first(),
        "operation": Operation.objects.last(),
    }
    for page, row in of.items():
        yield f"{page}: row", url(page, "change", row.pk if isinstance(row, Model) else row)
    yield "taskstate: form", url("taskstate", "enqueue", "tests.tasks.add")


def links(address: str, text: str) -> Iterator[str]:
    """Yield the addresses of filtered lists to which a page links."""
    for found in dict.fromkeys(re.findall(r'href="([^"]*\?[^"]*)"', text)):
        link = html.unescape(found)
        link = address.partition("?")[0] + link if link.startswith("?") else link
        if re.fullmatch(r"/admin/dbqueue/\w+/", urlsplit(link).path):
            yield link


def kind_of(address: str) -> str:
    """Return the page of an address and its parameters, with the values that have another plan."""
    parts = urlsplit(address)
    values = sorted(parse_qsl(parts.query))
    shown = "&".join(f"{name}={value if name in FEW_VALUES else ''}" for name, value in values)
    return parts.path.split("/")[3] + (f"?{shown}" if shown else "")


def cost_of(client: Client, address: str) -> tuple[Cost, str]:
    start = time.perf_counter()
    with CaptureQueriesContext(connection) as found:
        response = client.get(address)
    took = time.perf_counter() - start
    assert response.status_code == 200, address
    statements = [each["sql"] for each in found if "SAVEPOINT" not in each["sql"]]
    return Cost(statements, 1000 * took), response.text


def rows_read(sql: str) -> int:
    """Return the number of rows that a statement reads from tables and indexes."""
    query = re.sub(r"^DECLARE .*? FOR ", "", sql.strip(), flags=re.DOTALL)
    if not query.startswith(("SELECT", "WITH", "(")):
        return 0
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {query}")
        return _rows_of(cursor.fetchone()[0][0]["Plan"])


def _rows_of(plan: dict[str, Any]) -> int:
    own = 0
    if "Relation Name" in plan:
        removed = sum(n for name, n in plan.items() if name.startswith("Rows Removed by"))
        own = round((plan["Actual Rows"] + removed) * plan["Actual Loops"])
    return own + sum(map(_rows_of, plan.get("Plans", ())))
