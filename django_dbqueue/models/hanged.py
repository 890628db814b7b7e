from __future__ import annotations

from collections.abc import Mapping

from django.db.models import Exists, OuterRef, Q
from django.utils.translation import gettext_lazy as _

from .expressions import after
from .job import Job
from .jobs import JobQuerySet
from .process import Process
from .stack import Stack


class HangedJobQuerySet(JobQuerySet):
    def hanged(self, *, after_seconds: float, by_queue: Mapping[str, float]) -> HangedJobQuerySet:
        """Return the running jobs that hang.

        They run longer than jobs of their queue should, were noticed by their worker, or belong
        to a process without a heartbeat.
        """
        long = Q(started_at__lt=after(-after_seconds)) & ~Q(queue__in=list(by_queue))
        for queue, seconds in by_queue.items():
            long |= Q(queue=queue, started_at__lt=after(-seconds))
        noticed = Stack.objects.using(self.db).filter(job=OuterRef("pk"), attempt=OuterRef("attempt"))
        beating = Process.objects.using(self.db).alive().filter(pk=OuterRef("process_id"))
        return self.filter(state=Job.State.RUNNING).filter(long | Exists(noticed) | ~Exists(beating))


class HangedJob(Job):
    """A job on the page of hanged jobs. The permission to view jobs covers it."""

    objects = HangedJobQuerySet.as_manager()  # type: ignore[misc]

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("hanged job")
        verbose_name_plural = _("hanged jobs")
