"""The number of statements of each page: a page is opened while the database is in trouble."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from .test_permissions import PAGES, url

# The statements of a page itself; Django reads its session and its user with two more.
LIST, DETAIL, SESSION = 8, 12, 2


def statements(client: Client, address: str) -> list[str]:
    client.get(address)
    with CaptureQueriesContext(connection) as found:
        assert client.get(address).status_code == 200
    return [each["sql"] for each in found if "SAVEPOINT" not in each["sql"]]


@pytest.mark.parametrize("page", PAGES)
def test_list_takes_few_statements(
    rows_by_page: dict[str, Any], superuser: Client, page: str
) -> None:
    assert len(statements(superuser, url(page))) <= LIST + SESSION


@pytest.mark.parametrize("page", [page for page in PAGES if page != "hangedjob"])
def test_page_of_a_row_takes_few_statements(
    rows_by_page: dict[str, Any], superuser: Client, page: str
) -> None:
    address = url(page, "change", rows_by_page[page].pk)

    assert len(statements(superuser, address)) <= DETAIL + SESSION
