from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core.counts import Counts
from ..models import Job, TaskState
from ..results import JobResult
from ..tasks import AnyTask
from . import columns, formatting, rates
from .actions import PAUSE, PAUSE_FOR, RESUME
from .addresses import page_address
from .backend_choice import on_chosen_backend, with_backend
from .base import Fields
from .enqueue_form import EnqueueForm, backend_for
from .overview import bars_of, charts_of, distribution_of
from .queues import PausableAdmin
from .redaction import known_task
from .spans import Axis, span_links, span_of

ENQUEUE = "dbqueue.enqueue_taskstate"


class CountedTask(Protocol):
    """A task with its counts of the last hour."""

    name: str
    counts: Counts


@admin.display(description=gettext_lazy("jobs"))
def jobs(task: CountedTask) -> str:
    return formatting.jobs_link(_("View jobs"), task=task.name)


@admin.display(description=gettext_lazy("signature"))
def signature(task: CountedTask) -> str:
    if (known := known_task(task.name)) is None:
        return _("The task is not known in this process.")
    name = task.name.rpartition(".")[2]
    return format_html('<code dir="ltr">{}{}</code>', name, inspect.signature(known.func))


@admin.display(description=gettext_lazy("description"))
def description(task: CountedTask) -> str:
    known = known_task(task.name)
    text = inspect.getdoc(known.func) if known else ""
    return format_html('<pre class="dbq-text" dir="ltr">{}</pre>', text) if text else "–"


@admin.display(description=gettext_lazy("options"))
def policy(task: CountedTask) -> str:
    """Return the task's own options, as its decorator has them."""
    known = known_task(task.name)
    named = _options_of(known) if known else {}
    return rates.lines(*(f"{name}={value!r}" for name, value in named.items())) or "–"


def _options_of(task: AnyTask) -> dict[str, object]:
    """Return the options of the task that are not those of a task without any."""
    names = (
        *("queue_name", "priority", "max_attempts", "backoff", "retry_on", "discard_on"),
        *("timeout", "on_lost", "atomic", "delete_on_success", "key", "on_conflict"),
        *("concurrency", "rate", "enqueue_when", "expires"),
    )
    plain = {field: spec.default for field, spec in type(task).__dataclass_fields__.items()}
    found = {name: getattr(task, name, None) for name in names}
    return {name: value for name, value in found.items() if value != plain.get(name)}


def enqueue_address(request: HttpRequest, task: str, model: Job | None = None) -> str:
    """Return the address of the form that enqueues a job of the task; "" without permission.

    ``model`` is a job whose arguments the form begins with.
    """
    known = known_task(task)
    if not request.user.has_perm(ENQUEUE) or known is None or backend_for(known) is None:
        return ""
    address = page_address("taskstate_enqueue", task)
    return with_backend(f"{address}?job={model.pk}" if model else address)


LAST_HOUR = (rates.throughput, rates.failed, rates.run_time, rates.waiting_time)


@admin.register(TaskState)
class TaskStateAdmin(PausableAdmin):
    hint = gettext_lazy(
        "Tasks of the newest jobs, and tasks that were paused. "
        "Workers claim no jobs of a paused task."
    )
    actions = (PAUSE, PAUSE_FOR, RESUME)
    list_display = ("name", columns.paused, *LAST_HOUR, jobs)
    fieldsets: ClassVar[Fields] = (
        (None, {"fields": (("name", columns.paused, jobs), signature, description, policy)}),
        (gettext_lazy("In the last hour"), {"fields": (LAST_HOUR,)}),
    )

    def names(self, request: HttpRequest) -> Iterable[str]:
        return Job.objects.recent_tasks()

    def has_view_permission(self, request: HttpRequest, obj: TaskState | None = None) -> bool:
        return request.user.has_perm("dbqueue.view_job")

    def with_details(self, request: HttpRequest, rows: list[CountedTask]) -> list[CountedTask]:
        counts = rates.of_tasks()
        for task in rows:
            task.counts = counts.get(task.name, Counts())
        return rows

    def page_context(self, request: HttpRequest, row: Any) -> dict[str, object]:
        axis = Axis.until_now(span_of(request.GET.get("hours")))
        of = bars_of(axis, axis.counts(row.name))
        return {
            **super().page_context(request, row),
            "enqueue_address": enqueue_address(request, row.name),
            "charts": [*charts_of(axis, of), distribution_of(rates.merged(of).run_time)],
            "spans": span_links(axis.span),
        }

    def get_urls(self) -> list[URLPattern]:
        view = on_chosen_backend(self.admin_site.admin_view(self.enqueue_view), self.admin_site)
        own = path("<path:object_id>/enqueue/", view, name="dbqueue_taskstate_enqueue")
        return [own, *super().get_urls()]

    def enqueue_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show the form that enqueues a job, and enqueue it."""
        if not (self.has_view_permission(request) and request.user.has_perm(ENQUEUE)):
            raise PermissionDenied
        name = unquote(object_id)
        if (task := known_task(name)) is None:
            raise Http404(_("The task %s is not known in this process.") % name)
        if backend_for(task) is None:
            raise Http404(_("The task %s is of another kind of backend.") % name)
        model = self._model_of(request, name)
        form = EnqueueForm(task, model, request.POST if request.method == "POST" else None)
        is_confirmed = form.is_valid() and request.POST.get("confirmed") == form.token
        # A job that is run again is enqueued once its changes have been shown.
        if form.is_valid() and (is_confirmed or not model) and (result := form.enqueue()):
            return self._enqueued(request, name, result)
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": _("Enqueue a job"),
            "subtitle": name,
            "opts": self.opts,
            "media": self.media,
            "form": form,
            "task": name,
            "description": inspect.getdoc(task.func) or "",
            "model_job": model,
            "back": with_backend(
                page_address("job_change", model.pk)
                if model
                else page_address("taskstate_change", name)
            ),
        }
        return TemplateResponse(request, "admin/dbqueue/taskstate/enqueue.html", context)

    def _model_of(self, request: HttpRequest, task: str) -> Job | None:
        """Return the job whose arguments the form begins with, if the address names one."""
        if not (pk := request.GET.get("job")):
            return None
        try:
            return Job.objects.get(pk=pk, task=task)
        except (Job.DoesNotExist, ValidationError):
            text = _("There is no job %(pk)s of %(task)s.") % {"pk": pk, "task": task}
            raise Http404(text) from None

    def _enqueued(self, request: HttpRequest, task: str, result: JobResult) -> HttpResponse:
        pk, job = result.id, Job.objects.filter(pk=result.id).first()
        user: Any = request.user
        LogEntry.objects.create(
            user_id=user.pk,
            content_type_id=get_content_type_for_model(Job).pk,
            object_id=pk,
            object_repr=str(job or task)[:200],
            action_flag=CHANGE,
            change_message=_("Enqueued by hand: %s.") % result.enqueued,
        )
        texts = {
            "created": _("A job of %s was enqueued."),
            "merged": _("The key of this call has a job of %s, which has taken it over."),
            "ignored": _("The key of this call has a job of %s, which is unchanged."),
        }
        level = messages.WARNING if result.enqueued == "ignored" else messages.SUCCESS
        messages.add_message(request, level, texts[result.enqueued] % task)
        return HttpResponseRedirect(with_backend(page_address("job_change", pk)))
