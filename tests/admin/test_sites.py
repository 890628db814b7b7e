"""The pages on a project's other admin sites, and with other themes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin import AdminSite
from django.test import Client
from django.urls import path

from django_dbqueue.models import Job, Queue

from .conftest import a_batch, a_failure, a_job, a_process, a_recurring_task, an_execution

ops = AdminSite(name="ops")
for model, page in admin.site._registry.items():
    if model._meta.app_label == "dbqueue":
        ops.register(model, type(page))

urlpatterns = [path("admin/", admin.site.urls), path("ops/", ops.urls)]
PAGES = [model._meta.model_name for model in ops._registry]


@pytest.fixture
def rows(failed: Callable[..., Job]) -> dict[str, Any]:
    failure = a_failure()
    job = failed(failure, queue="mail")
    an_execution(job, failure, attempt=5)
    process = a_process("worker@here:1:abc")
    a_job(state=Job.State.RUNNING, process=process, attempt=1, queue="mail")
    rows = [failure, job, process, a_batch(job), a_recurring_task()]
    rows.append(Queue.objects.get_or_create(name="mail")[0])
    return {row._meta.model_name: row for row in rows}


@pytest.mark.urls(__name__)
@pytest.mark.parametrize("page", PAGES)
def test_pages_link_to_their_own_site(superuser: Client, rows: dict[str, Any], page: str) -> None:
    addresses = [f"/ops/dbqueue/{page}/"]
    if page in rows:
        addresses.append(f"/ops/dbqueue/{page}/{rows[page].pk}/change/")

    for address in addresses:
        response = superuser.get(address)

        assert response.status_code == 200
        links = re.findall(r'(?:href|action)="([^"]+)"', response.text)
        assert "/ops/" in links
        assert [link for link in links if link.startswith("/admin/")] == []


def test_no_filter_has_an_attribute_that_themes_take_for_a_model_field() -> None:
    """Grappelli reads ``filter.field.name``."""
    filters = {
        each
        for page in ops._registry.values()
        for each in page.list_filter
        if isinstance(each, type)
    }

    assert len(filters) > 5
    assert [each for each in filters if hasattr(each, "field")] == []
