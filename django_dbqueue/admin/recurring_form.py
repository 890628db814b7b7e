"""Form for recurring tasks that are created in the admin, validated like those in code."""

from __future__ import annotations

from django import forms
from django.db import router
from django.utils.translation import gettext_lazy as _

from ..exceptions import InvalidSchedule, InvalidTaskPath
from ..models import RecurringTask
from ..models.document import Unreadable
from ..recurrence.target import resolve
from ..registry import discover
from .config import alias, options


class RecurringTaskForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = RecurringTask
        fields = (
            *("name", "task", "command", "args", "kwargs", "queue", "priority"),
            *("cron", "timezone", "every", "drift", "starts_at", "ends_at"),
            *("missed", "most_missed", "jitter"),
        )
        widgets = {"args": forms.Textarea({"rows": 2}), "kwargs": forms.Textarea({"rows": 2})}

    def get_initial_for_field(self, field: forms.Field, field_name: str) -> object:
        value = super().get_initial_for_field(field, field_name)
        return None if isinstance(value, Unreadable) else value

    def clean_args(self) -> object:
        return [] if self.cleaned_data["args"] is None else self.cleaned_data["args"]

    def clean_kwargs(self) -> object:
        return {} if self.cleaned_data["kwargs"] is None else self.cleaned_data["kwargs"]

    def clean(self) -> dict[str, object] | None:
        given = super().clean() or self.cleaned_data
        # The model's constraints report missing and surplus values.
        if not self.errors and bool(given["cron"]) != (given["every"] is not None):
            self._check_schedule(RecurringTask(**given))
        if not self.errors and bool(given["task"]) != bool(given["command"]):
            self._check_call(RecurringTask(**given))
        return given

    def _check_schedule(self, row: RecurringTask) -> None:
        try:
            if not row.next_times(1):
                self.add_error("ends_at", _("There is no time left before “ends at”."))
        except InvalidSchedule as error:
            self.add_error("cron" if row.cron else "every", str(error))

    def _check_call(self, row: RecurringTask) -> None:
        discover(options().task_modules)
        database = router.db_for_write(RecurringTask, instance=self.instance)
        try:
            resolve(row, database, alias())
        except (InvalidSchedule, InvalidTaskPath) as error:
            self.add_error("command" if row.command else "task", str(error))
