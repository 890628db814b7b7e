"""The API reference (docs/api.md) has every public name, and each has a docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from django.db.models import QuerySet
from django.dispatch import Signal

import django_dbqueue
from django_dbqueue import Task, models, signals

REFERENCE = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
MODULES = [
    "backend",
    "backoff",
    "batches",
    "beside",
    "context",
    "contrib.celery.canvas",
    "contrib.celery.options",
    "contrib.celery.results",
    "contrib.celery.tasks",
    "contrib.mail",
    "contrib.opentelemetry",
    "contrib.prometheus",
    "contrib.sentry",
    "contrib.structlog",
    "contrib.tasks",
    "exceptions",
    "limits",
    "log",
    "middleware",
    "pipelines",
    "results",
    "routers",
    "testing",
]
# Defined without an underscore, for the package's own use.
INTERNAL = {
    "batches.Entry",
    "contrib.celery.options.Backoff",
    "contrib.celery.options.rate_of",
    "contrib.celery.options.settings_of",
    "contrib.celery.results.jobs",
    "contrib.prometheus.serve",
    "limits.are_readable",
    "limits.check",
    "limits.of_call",
    "limits.of_task",
    "limits.strictest",
    "results.result_of",
}
OPERATED = [
    models.Alert,
    models.Batch,
    models.Execution,
    models.Failure,
    models.Job,
    models.Process,
    models.Queue,
    models.RecurringTask,
    models.TaskState,
]
# Methods that return the number of changed rows, and are not for operators.
OF_THE_ENGINE = {
    "JobQuerySet.take_back_reruns",
    "PrimaryQuerySet.update_in_parts",
    "ProcessQuerySet.erase",
}


def described() -> Iterator[tuple[str, Any]]:
    """Each name that the reference describes, and the object: of classes their members too."""
    directive = (
        r"^\.\. auto(?:class|exception|function):: (django_dbqueue[\w.]*)(.*\n(?: +.*\n|\n(?= ))*)"
    )
    for path, options in re.findall(directive, REFERENCE, re.M):
        module, _, name = path.rpartition(".")
        found = getattr(import_module(module), name)
        yield path, found
        for members in re.findall(r"^ +:members: (.+)$", options, re.M):
            for member in members.split(", "):
                yield f"{path}.{member}", inspect.getattr_static(found, member)


DESCRIBED = dict(described())


def is_described(found: Any) -> bool:
    return any(each is found for each in DESCRIBED.values())


def docstring_of(found: Any) -> str:
    """The docstring in the code: not an inherited one, nor the signature that a dataclass has by default."""
    found = found.func if isinstance(found, Task) else found
    text = found.__doc__ or ""
    return "" if inspect.isclass(found) and text.startswith(f"{found.__name__}(") else text


def public_names(module_name: str) -> Iterator[tuple[str, Any]]:
    """The public classes, functions and tasks that a module defines itself."""
    module = import_module(f"django_dbqueue.{module_name}")
    for name, value in vars(module).items():
        is_own = str(getattr(value, "__module__", "")).startswith(module.__name__) and (
            inspect.isclass(value) or inspect.isfunction(value)
        )
        is_own_task = isinstance(value, Task) and value.func.__module__ == module.__name__
        if not name.startswith("_") and (is_own or is_own_task):
            yield f"{module_name}.{name}", value


def operators_actions(model: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The methods of the model's querysets that return the number of changed rows."""
    for cls in type(model.objects.all()).__mro__:
        if not cls.__module__.startswith("django_dbqueue.") or not issubclass(cls, QuerySet):
            continue
        for name, value in vars(cls).items():
            is_public = inspect.isfunction(value) and not name.startswith("_")
            if is_public and value.__annotations__.get("return") == "int":
                yield f"{cls.__name__}.{name}", value


def test_each_name_that_the_package_exports_is_in_the_reference():
    missing = [name for name in django_dbqueue.__all__ if f"django_dbqueue.{name}" not in DESCRIBED]
    summary = re.findall(r"^   (\w+)$", REFERENCE, re.M)

    assert missing == []
    assert sorted(summary) == sorted(django_dbqueue.__all__)


@pytest.mark.parametrize("module", MODULES)
def test_each_public_name_of_a_module_is_in_the_reference(module: str):
    names = dict(public_names(module))
    missing = [
        name for name, value in names.items() if name not in INTERNAL and not is_described(value)
    ]

    assert names
    assert missing == []
    assert f".. automodule:: django_dbqueue.{module}\n" in REFERENCE


def test_each_signal_is_in_the_reference_and_in_the_docstring_of_its_module():
    defined = {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    listed = re.findall(r"^(?:\.\. py:data::| {12}) (\w+)$", REFERENCE, re.M)

    assert defined == {*signals.__all__} == {*listed}
    assert ".. automodule:: django_dbqueue.signals\n" in REFERENCE


def test_internal_names_are_defined_and_not_in_the_reference():
    names = {name: value for module in MODULES for name, value in public_names(module)}

    assert names.keys() >= INTERNAL
    assert not any(is_described(names[name]) for name in INTERNAL)


@pytest.mark.parametrize("model", OPERATED, ids=lambda model: model.__name__)
def test_each_operators_action_is_in_the_reference(model: Any):
    assert f"django_dbqueue.models.{model.__name__}" in DESCRIBED
    assert [
        name
        for name, value in operators_actions(model)
        if name not in OF_THE_ENGINE and not is_described(value)
    ] == []


def test_each_name_in_the_reference_has_a_docstring():
    described = {
        path: value
        for path, value in DESCRIBED.items()
        # The reference itself says which rows a queryset has.
        if not (inspect.isclass(value) and issubclass(value, QuerySet))
    }

    assert len(described) > 100
    assert [path for path, value in described.items() if not docstring_of(value)] == []
