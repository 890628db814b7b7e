"""Form for recurring tasks that are created in the admin, validated like those in code."""

from __future__ import annotations

from typing import Any

from django import forms
from django.db import router
from django.utils.translation import gettext_lazy as _

from ..core.redaction import has_hidden, with_secrets
from ..exceptions import InvalidSchedule, InvalidTaskPath
from ..models import RecurringTask
from ..models.document import Unreadable
from ..recurrence.target import resolve
from ..registry import discover
from .config import alias, options
from .redaction import call_without_secrets

ARGUMENTS = ("args", "kwargs")


class RecurringTaskForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = RecurringTask
        fields = (
            *("name", "task", "command", "args", "kwargs", "queue", "priority"),
            *("cron", "timezone", "every", "drift", "starts_at", "ends_at"),
            *("missed", "most_missed", "jitter"),
        )
        widgets = {"args": forms.Textarea({"rows": 2}), "kwargs": forms.Textarea({"rows": 2})}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shown = call_without_secrets(self.instance) if self.instance.pk else ([], {})
        # The arguments as they are shown: without hidden values.
        self._shown = dict(zip(ARGUMENTS, shown, strict=True))
        for name, value in self._shown.items():
            if name in self.fields and has_hidden(value):
                self.fields[name].help_text = _("Hidden values stay as they are if left so.")

    def get_initial_for_field(self, field: forms.Field, field_name: str) -> object:
        value = super().get_initial_for_field(field, field_name)
        if isinstance(value, Unreadable):
            return None
        return self._shown[field_name] if self.instance.pk and field_name in ARGUMENTS else value

    def clean_args(self) -> object:
        return self._argument("args", [])

    def clean_kwargs(self) -> object:
        return self._argument("kwargs", {})

    def _argument(self, name: str, empty: object) -> object:
        """Return the value of a field, with the hidden values of the row that is changed."""
        value, row = self.cleaned_data[name], self.instance
        if value is None:
            return empty
        # Another task could show them.
        if all(self.cleaned_data.get(each) == getattr(row, each) for each in ("task", "command")):
            value = with_secrets(value, self._shown[name], getattr(row, name))
        if has_hidden(value):
            raise forms.ValidationError(
                _("Enter the hidden values again: they would have another place or task.")
            )
        return value

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
