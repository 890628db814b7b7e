"""What a process of its own declares, for the tests that start one."""

from __future__ import annotations

from datetime import timedelta

from django_dbqueue import recurring, task

from .models import Effect


@recurring(every=timedelta(seconds=1))
@task
def tick():
    Effect.objects.create(job="tick", attempt=1)
