from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from .job import Job


class HangedJob(Job):
    """A job as the page of hanged jobs lists it; who may view jobs may view it."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("hanged job")
        verbose_name_plural = _("hanged jobs")
