"""The form that enqueues a job by hand: a field for each parameter of the task's function."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from django import forms
from django.db import transaction
from django.utils.text import format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core.serialization import signature_of
from ..models import Job
from ..models.enums import HIGHEST_PRIORITY
from ..results import JobResult
from ..tasks import AnyTask
from .actions import QueueField, TimeField
from .config import backend
from .redaction import HIDDEN, is_hidden, without_secrets

# Fields of parameters have a prefix: a parameter may be called queue_name.
PREFIX = "arg_"
# JSON's null, which is not an empty field.
NULL = object()


class Change(NamedTuple):
    """An argument that differs from that of the job which is run again."""

    name: str
    before: object
    after: object


class EnqueueForm(forms.Form):
    """Arguments of a task, and when and where its job runs.

    ``model`` is a job of the task whose arguments the form begins with.
    """

    queue_name = QueueField(label=gettext_lazy("queue"), required=False)
    priority = forms.IntegerField(
        label=gettext_lazy("priority"), min_value=-HIGHEST_PRIORITY, max_value=HIGHEST_PRIORITY
    )
    run_after = TimeField(
        label=gettext_lazy("run after"),
        required=False,
        help_text=format_lazy(
            "{} {}", gettext_lazy("Empty: as soon as a worker is free."), TimeField.zone
        ),
    )

    def __init__(self, task: AnyTask, model: Job | None = None, data: Any = None) -> None:
        self._task, self._model = task, model
        self._given = _arguments_of(task, model) if model else {}
        place = model or task
        queue = model.queue if model else task.queue_name
        super().__init__(data, initial={"queue_name": queue, "priority": place.priority})
        own = dict(self.fields)
        self.fields.clear()
        hints = _hints(task)
        self._parameters = list(_parameters(task))
        for each in self._parameters:
            field = _field(each, hints.get(each.name, Any))
            if self._is_hidden(each.name):
                self._hide(field, each.name)
            elif each.name in self._given:
                field.initial = self._given[each.name]
            self.fields[PREFIX + each.name] = field
        self.fields.update(own)

    def _is_hidden(self, name: str) -> bool:
        """Return True if the name, or a part of its value in the other job, is hidden."""
        given = self._given.get(name)
        return is_hidden(name) or without_secrets(given) != given

    def _hide(self, field: forms.Field, name: str) -> None:
        field.widget = forms.PasswordInput(render_value=True, attrs={"autocomplete": "off"})
        if name in self._given:
            field.required = False
            field.help_text = _("Hidden. Empty: the value of the job that is run again.")

    def clean(self) -> dict[str, Any]:
        """Check that the arguments fit the task, as ``enqueue()`` does."""
        if not self.errors:
            self._args, self._kwargs = self._call()
        return self.cleaned_data

    def _call(self) -> tuple[list[object], dict[str, object]]:
        """Return the positional and keyword arguments. Empty ones by name are left out."""
        by_name = {each.name: self._value(each) for each in self._parameters}
        kinds = {each.kind: each.name for each in self._parameters}
        rest = by_name.pop(kinds.get(Parameter.VAR_POSITIONAL, ""), None) or []
        more = by_name.pop(kinds.get(Parameter.VAR_KEYWORD, ""), None) or {}
        # Further arguments follow all others, which then cannot be given by name.
        places = {Parameter.POSITIONAL_ONLY, *[Parameter.POSITIONAL_OR_KEYWORD] * bool(rest)}
        args = [
            each.default if (value := by_name.pop(each.name)) is each.empty else value
            for each in self._parameters
            if each.kind in places
        ]
        kwargs = {name: value for name, value in by_name.items() if value is not Parameter.empty}
        return [*args, *rest], {**kwargs, **more}

    def _value(self, parameter: Parameter) -> Any:
        """Return the value of a field; ``Parameter.empty`` for the default of the function."""
        value = self.cleaned_data[PREFIX + parameter.name]
        if value is NULL:
            return None
        if value not in (None, ""):
            return value
        if parameter.name in self._given and self._is_hidden(parameter.name):
            return self._given[parameter.name]
        return None if parameter.default is parameter.empty else parameter.empty

    @property
    def changes(self) -> list[Change]:
        """The differences to the job that is run again. Hidden values are not shown."""
        found = []
        for each in self._parameters:
            before, after = self._given.get(each.name), self._value(each)
            if before == after or (after is each.empty and each.name not in self._given):
                continue
            if self._is_hidden(each.name):
                before, after = HIDDEN, _("changed")
            elif after is each.empty:
                after = _("the default")
            found.append(Change(each.name, before, after))
        return found

    @property
    def token(self) -> str:
        """A digest of what the form would enqueue: a confirmation holds for this only."""
        call = [self._args, self._kwargs, self.cleaned_data["queue_name"]]
        return hashlib.sha256(json.dumps(call, default=repr).encode()).hexdigest()[:16]

    def enqueue(self) -> JobResult | None:
        """Enqueue the job. If the task refuses the call, add an error and return None."""
        values = self.cleaned_data
        options = {"priority": values["priority"], "run_after": values["run_after"]}
        if values["queue_name"]:
            options["queue_name"] = values["queue_name"]
        if chosen := backend():
            options["backend"] = chosen.alias
        try:
            with transaction.atomic(using=chosen.database if chosen else None):
                return self._task.using(**options).enqueue(*self._args, **self._kwargs)
        except Exception as error:  # A key function of the project may raise anything.
            self.add_error(None, f"{type(error).__name__}: {error}")
            return None


def _parameters(task: AnyTask) -> Iterator[Parameter]:
    parameters = list(signature_of(task.func).parameters.values())
    yield from parameters[task.takes_context :]


def _arguments_of(task: AnyTask, job: Job) -> dict[str, Any]:
    """Return the job's arguments by parameter."""
    try:
        leading = (None,) if task.takes_context else ()
        bound = signature_of(task.func).bind_partial(*leading, *job.args, **job.kwargs)
    except TypeError:  # They no longer fit: the signature has changed.
        return {}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in list(bound.arguments.items())[task.takes_context :]
    }


def _hints(task: AnyTask) -> dict[str, Any]:
    try:
        return get_type_hints(task.func)
    except Exception:  # A name that exists for type checkers only.
        return {}


class JsonField(forms.JSONField):
    """A field for any JSON value. An empty list is a value, too, and so is null."""

    def __init__(self, of: type | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._of = of
        self.empty_values = [None, ""]
        self.widget.attrs |= {"rows": 2, "dir": "ltr"}

    def to_python(self, value: Any) -> Any:
        found = super().to_python(value)
        if found is None:
            return NULL if value else None
        if self._of and not isinstance(found, self._of):
            raise forms.ValidationError(self.help_text)
        return found

    def prepare_value(self, value: Any) -> Any:
        return "" if value is None else super().prepare_value(value)


def _field(parameter: Parameter, hint: Any) -> forms.Field:
    """Return the field of a parameter, by its type hint. A type that is not simple is JSON."""
    hint, is_optional = _without_none(hint)
    has_default = parameter.default is not parameter.empty
    given: dict[str, Any] = {"label": parameter.name, "required": not (has_default or is_optional)}
    initial = parameter.default if has_default and _is_json(parameter.default) else None
    if parameter.kind is Parameter.VAR_POSITIONAL:
        given |= {"required": False, "help_text": _("Further arguments, as a JSON list.")}
        return JsonField(list, **given)
    if parameter.kind is Parameter.VAR_KEYWORD:
        given |= {"required": False, "help_text": _("Further arguments, as a JSON object.")}
        return JsonField(dict, **given)
    if hint is bool or get_origin(hint) is Literal:
        values = (True, False) if hint is bool else get_args(hint)
        return ChoiceField(values, **given, initial=initial)
    if hint in SIMPLE:
        return SIMPLE[hint](**given, initial=initial)
    help_text = _("JSON; text in double quotes.")
    return JsonField(**given, initial=initial, help_text=help_text)


class ChoiceField(forms.TypedChoiceField):
    """A field for one of some JSON values."""

    def __init__(self, values: Iterable[Any], **kwargs: Any) -> None:
        self._keys = {json.dumps(value): value for value in values}
        choices = [("", "–"), *self._keys.items()]
        super().__init__(choices=choices, coerce=json.loads, empty_value=None, **kwargs)

    def prepare_value(self, value: Any) -> Any:
        # A value that was submitted is JSON already.
        return value if value in self._keys else json.dumps(value)


SIMPLE: dict[Any, Callable[..., forms.Field]] = {
    int: forms.IntegerField,
    float: forms.FloatField,
    str: partial(forms.CharField, strip=False),
}


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return a hint without ``None``, and whether it had it."""
    if get_origin(hint) in (Union, UnionType):
        others = [each for each in get_args(hint) if each is not NoneType]
        if len(others) < len(get_args(hint)):
            return (others[0] if len(others) == 1 else Any), True
    return hint, False
