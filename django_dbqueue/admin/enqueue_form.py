"""The form that enqueues a job by hand: a field for each parameter of the task's function."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from django import forms
from django.db import transaction
from django.utils.crypto import salted_hmac
from django.utils.text import format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..backend import DatabaseBackend
from ..core.serialization import signature_of, to_json
from ..models import Job
from ..models.enums import HIGHEST_PRIORITY
from ..results import JobResult
from ..tasks import AnyTask
from .actions import QueueField, TimeField
from .config import backend
from .redaction import HIDDEN, is_hidden, without_secrets

# Fields of parameters have a prefix: a parameter may be called queue_name.
PREFIX = "arg_"
# No value: the function's default.
EMPTY = Parameter.empty
VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


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
        self._task, self._backend = task, backend_for(task)
        given = _arguments_of(task, model) if model else {}
        # The arguments of the job no longer fit the function.
        self.has_changed_signature = given is None
        self._given: dict[str, Any] = given or {}
        place = model or task
        queue = model.queue if model else task.queue_name
        super().__init__(data, initial={"queue_name": queue, "priority": place.priority})
        own = dict(self.fields)
        own["queue_name"].backend = self._backend  # type: ignore[attr-defined]
        self.fields.clear()
        hints = _hints(task)
        self._parameters = list(_parameters(task))
        for each in self._parameters:
            self.fields[PREFIX + each.name] = self._field(each, hints.get(each.name, Any))
        self.fields.update(own)

    def _field(self, parameter: Parameter, hint: Any) -> forms.Field:
        given = self._given.get(parameter.name, EMPTY)
        if not self._is_hidden(parameter.name):
            return _field(parameter, hint, given)
        field = _field(parameter, hint if hint is str else Any, EMPTY)
        field.widget = forms.PasswordInput(render_value=True, attrs={"autocomplete": "off"})
        if given is not EMPTY:
            field.required = False
            field.help_text = _("Hidden. Empty: the value of the job that is run again.")
        return field

    def _is_hidden(self, name: str) -> bool:
        """Return True if the name, or a part of its value in the other job, is hidden."""
        given = self._given.get(name)
        return is_hidden(name) or without_secrets(given) != given

    def clean(self) -> dict[str, Any]:
        if not self.errors:
            self._args, self._kwargs = self._call()
        return self.cleaned_data

    def _call(self) -> tuple[list[object], dict[str, object]]:
        """Return the positional and keyword arguments, without those that have no value."""
        by_name = {each.name: self._value(each) for each in self._parameters}
        kinds = {each.kind: each.name for each in self._parameters}
        rest = by_name.pop(kinds.get(Parameter.VAR_POSITIONAL, ""), EMPTY)
        more = by_name.pop(kinds.get(Parameter.VAR_KEYWORD, ""), EMPTY)
        rest, more = [] if rest is EMPTY else rest, {} if more is EMPTY else more
        # Further arguments follow all others; and ``enqueue()`` has a parameter ``self`` itself.
        names = list(by_name)
        last = len(names) if rest else names.index("self") if "self" in names else -1
        placed = [
            each
            for each in self._parameters
            if each.kind is Parameter.POSITIONAL_ONLY
            or (each.kind is Parameter.POSITIONAL_OR_KEYWORD and names.index(each.name) <= last)
        ]
        while placed and not rest and by_name[placed[-1].name] is EMPTY:
            by_name.pop(placed.pop().name)
        args = [
            each.default if (value := by_name.pop(each.name)) is EMPTY else value for each in placed
        ]
        kwargs = {name: value for name, value in by_name.items() if value is not EMPTY}
        return [*args, *rest], {**kwargs, **more}

    def _value(self, parameter: Parameter) -> Any:
        """Return the value of a field; EMPTY for the default of the function."""
        name = parameter.name
        if self._is_filled_in(name):
            return self.cleaned_data[PREFIX + name]
        if name in self._given and self._is_hidden(name):
            return self._given[name]
        if parameter.default is not EMPTY or parameter.kind in VARIADIC:
            return EMPTY
        return "" if isinstance(self.fields[PREFIX + name], TextField) else None

    def _is_filled_in(self, name: str) -> bool:
        return bool(self.data.get(PREFIX + name, "") != "")

    @property
    def changes(self) -> list[Change]:
        """The differences to the job that is run again.

        Hidden values are neither shown nor compared, as a value could be guessed: those that the
        user has entered count as changed.
        """
        found = []
        for each in self._parameters:
            before, after = map(_as_text, (self._given.get(each.name, EMPTY), self._value(each)))
            if self._is_hidden(each.name):
                if self._is_filled_in(each.name):
                    found.append(Change(each.name, HIDDEN, _("changed")))
            elif before != after:
                found.append(Change(each.name, before, after))
        return found

    @property
    def token(self) -> str:
        """A keyed digest of what the form would enqueue: a confirmation holds for this only."""
        values = self.cleaned_data
        place = [values["queue_name"], values["priority"], values["run_after"]]
        text = json.dumps([self._args, self._kwargs, place], default=repr)
        # Keyed: the arguments may have hidden values that can be guessed.
        return salted_hmac(
            "django_dbqueue.admin.enqueue_form", text, algorithm="sha256"
        ).hexdigest()

    def enqueue(self) -> JobResult | None:
        """Enqueue the job. If the task refuses the call, add an error and return None."""
        if self._backend is None:
            return None
        values = self.cleaned_data
        options = {"priority": values["priority"], "run_after": values["run_after"]}
        if values["queue_name"]:
            options["queue_name"] = values["queue_name"]
        task = self._task.using(**options, backend=self._backend.alias)
        try:
            with transaction.atomic(using=self._backend.database):
                return task.enqueue(*self._args, **self._kwargs)
        except Exception as error:  # A key function of the project may raise anything.
            # Its text may have the value of an argument.
            is_secret = any(self._is_hidden(each.name) for each in self._parameters)
            said = type(error).__name__ if is_secret else f"{type(error).__name__}: {error}"
            self.add_error(None, said)
            return None


def backend_for(task: AnyTask) -> DatabaseBackend | None:
    """Return the backend of a job enqueued by hand.

    The task's own, if its jobs are in the database of the page; else the page's. None for a task of
    another kind of backend.
    """
    own, chosen = task.get_backend(), backend()
    if not isinstance(own, DatabaseBackend):
        return None
    return own if chosen is None or own.database == chosen.database else chosen


def _parameters(task: AnyTask) -> Iterator[Parameter]:
    parameters = list(signature_of(task.func).parameters.values())
    yield from parameters[task.takes_context :]


def _arguments_of(task: AnyTask, job: Job) -> dict[str, Any] | None:
    """Return the job's arguments by parameter; None if they no longer fit."""
    leading = (None,) if task.takes_context else ()
    if not isinstance(job.args, list) or not isinstance(job.kwargs, dict):
        return None
    try:
        bound = signature_of(task.func).bind(*leading, *job.args, **job.kwargs)
    except TypeError:
        return None
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in list(bound.arguments.items())[task.takes_context :]
    }


def _hints(task: AnyTask) -> dict[str, Any]:
    try:
        return get_type_hints(task.func)
    except Exception:  # A name that exists for type checkers only.
        return {}


class TextField(forms.CharField):
    """A field for text, which may have several lines, and may be empty."""

    def __init__(self, **kwargs: Any) -> None:
        widget = forms.Textarea({"rows": 1})
        super().__init__(strip=False, widget=widget, **{**kwargs, "required": False})

    def to_python(self, value: Any) -> str:
        # Browsers send lines of a text with both characters.
        return str(super().to_python(value)).replace("\r\n", "\n")


class JsonField(forms.CharField):
    """A field for a JSON value. What the queue cannot store is refused."""

    def __init__(self, of: type | None = None, **kwargs: Any) -> None:
        given = {"help_text": _("JSON; text in double quotes."), **kwargs}
        super().__init__(widget=forms.Textarea({"rows": 2, "dir": "ltr"}), **given)
        self._of = of

    def clean(self, value: Any) -> Any:
        if (text := super().clean(value)) == "":
            return None
        try:
            found = to_json(json.loads(text))
        except RecursionError:
            raise forms.ValidationError(_("The value is nested too deeply.")) from None
        except (TypeError, ValueError) as error:
            message = _("This is not a JSON value that can be stored: %(error)s")
            raise forms.ValidationError(message % {"error": error}) from None
        if self._of and not isinstance(found, self._of):
            raise forms.ValidationError(self.help_text)
        return found


class ChoiceField(forms.TypedChoiceField):
    """A field for one of some JSON values."""

    def __init__(self, values: Iterable[Any], **kwargs: Any) -> None:
        texts = [json.dumps(value, ensure_ascii=False) for value in values]
        choices = [("", "–"), *((text, text) for text in texts)]
        super().__init__(choices=choices, coerce=json.loads, empty_value=None, **kwargs)


def _field(parameter: Parameter, hint: Any, given: Any) -> forms.Field:
    """Return the field of a parameter, by its type hint.

    What is not simple is JSON, and so is a given value that the simple field cannot show.
    """
    hint, is_optional = _without_none(hint)
    has_default = parameter.default is not EMPTY
    options: dict[str, Any] = {"label": parameter.name}
    if parameter.kind in VARIADIC:
        is_list = parameter.kind is Parameter.VAR_POSITIONAL
        options |= {
            "required": False,
            "initial": "" if given is EMPTY else _as_text(given),
            "help_text": _("Further arguments, as a JSON list.")
            if is_list
            else _("Further arguments, as a JSON object."),
        }
        return JsonField(list if is_list else dict, **options)
    options["required"] = not (has_default or is_optional)
    default = _("Default: %s.") % _as_text(parameter.default) if has_default else ""
    if values := _choices(hint):
        texts = {json.dumps(value, ensure_ascii=False) for value in values}
        if given is EMPTY or _as_text(given) in texts:
            initial = None if given is EMPTY else _as_text(given)
            return ChoiceField(values, **options, initial=initial, help_text=default)
    simple: dict[Any, Any] = {
        int: forms.IntegerField,
        float: forms.FloatField,
        str: TextField,
    }
    if isinstance(hint, type) and hint in simple and not is_optional:
        fits = type(given) in ((int, float) if hint is float else (hint,)) and given != ""
        if given is EMPTY or fits:
            initial = None if given is EMPTY else given
            field: forms.Field = simple[hint](**options, initial=initial, help_text=default)
            return field
    initial = "" if given is EMPTY else _as_text(given)
    help_text = " ".join(filter(None, [_("JSON; text in double quotes."), default]))
    return JsonField(**options, initial=initial, help_text=help_text)


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the values of a bool or a Literal; none if one of them is not JSON."""
    if hint is bool:
        return (True, False)
    values = get_args(hint) if get_origin(hint) is Literal else ()
    is_plain = all(type(value) in (str, int, bool, NoneType) for value in values)
    return values if is_plain else ()


def _as_text(value: object) -> str:
    """Return a value as JSON, or as Python shows it; "the default" for none."""
    if value is EMPTY:
        return _("the default")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return a hint without ``None``, and whether it had it."""
    if get_origin(hint) in (Union, UnionType):
        others = [each for each in get_args(hint) if each is not NoneType]
        if len(others) < len(get_args(hint)):
            return (others[0] if len(others) == 1 else Any), True
    return hint, False
