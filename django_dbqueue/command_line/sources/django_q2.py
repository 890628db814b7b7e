"""django-q2 with its ORM broker: signed pickles in one table, and schedules in another."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

from django.conf import settings
from django.db import router
from django.utils import timezone

from ...models.expressions import Now
from .source import Schedule, Source, Unfit, Waiting, check_days

# What its monitor does after a job, and a job here does not.
NOT_HERE = ("chain", "hook", "iter_count", "cached", "iter_cached")
INTERVALS = {"H": timedelta(hours=1), "BW": timedelta(weeks=2)}
LAST_DAY = 28


class DjangoQ2(Source):
    name, app = "django-q2", "django_q"

    def databases(self) -> list[str]:
        if not (alias := _conf().ORM):
            raise Unfit("Q_CLUSTER names no 'orm': only jobs of the ORM broker are in a database.")
        # The schedules may be in another one.
        return sorted({alias, router.db_for_write(self.model("Schedule"))})

    def parts(self) -> list[Any]:
        # A lock that has not ended is of a job that runs, or that waits to be tried again.
        once = self.model("Schedule").objects.filter(schedule_type="O", repeats__lt=0)
        return [self.model("OrmQ").objects.filter(lock__lt=Now()), once.exclude(next_run=None)]

    def read(self, row: Any) -> Waiting:
        if isinstance(row, self.model("Schedule")):
            args, kwargs, options = _arguments(row)
            return Waiting(
                task=row.func,
                args=args,
                kwargs=kwargs,
                queue=row.cluster,
                run_after=row.next_run,
                options=options,
            )
        try:
            package = import_module("django_q.signing").SignedPackage
            found: Mapping[str, Any] = package.loads(row.payload)
        except Exception as error:
            raise Unfit(f"It cannot be read: {type(error).__name__}: {error}") from None
        return Waiting(
            task=_path(found["func"]),
            args=found.get("args", ()),
            kwargs=found.get("kwargs", {}),
            queue=row.key if row.key != _conf().CLUSTER_NAME else None,
            metadata={"group": found["group"]} if found.get("group") else {},
            options=_options(found),
        )

    def identity(self, row: Any) -> str:
        return f"{row._meta.db_table} {row.pk}"

    def schedules(self) -> list[Any]:
        rows = self.model("Schedule").objects.exclude(repeats=0).exclude(next_run=None)
        return [rows.exclude(schedule_type="O", repeats__lt=0)]

    def read_schedule(self, row: Any) -> Schedule:
        if row.repeats > 0:
            raise Unfit(f"It ends after {row.repeats} more runs. Make it here with an end.")
        args, kwargs, options = _arguments(row)
        if options:
            raise Unfit("It has a timeout of its own. Give it to the task, and remove it there.")
        return Schedule(
            name=row.name or f"{self.name} {row.pk}",
            task=row.func,
            args=args,
            kwargs=kwargs,
            queue=row.cluster,
            when={
                **_times(row),
                # With CATCH_UP, each round of its scheduler runs one that was missed.
                "missed": "all" if _conf().CATCH_UP else "one",
                "next_run_at": row.next_run,
            },
        )


def _conf() -> Any:
    return import_module("django_q.conf").Conf


def _options(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a job here has of the options there. Raises Unfit for the others."""
    if used := [name for name in NOT_HERE if found.get(name)]:
        raise Unfit(f"It has {', '.join(used)}, which nothing here does. Let it end there.")
    return {"timeout": found["timeout"]} if found.get("timeout") else {}


def _path(function: Any) -> str:
    if isinstance(function, str):
        return function
    if not hasattr(function, "__qualname__"):
        raise Unfit(f"{function!r} has no path by which it could be found.")
    return f"{function.__module__}.{function.__qualname__}"


def _arguments(row: Any) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return the arguments of a schedule, which are Python literals as text, and its options."""
    if used := [name for name in ("hook", "intended_date_kwarg") if getattr(row, name, None)]:
        raise Unfit(f"It has {', '.join(used)}, which nothing here does. Let it end there.")
    try:
        args = ast.literal_eval(row.args) if row.args else ()
        kwargs = _keywords(row.kwargs) if row.kwargs else {}
    except (ValueError, SyntaxError):
        raise Unfit(f"Its arguments are no literals: {row.args!r}, {row.kwargs!r}.") from None
    options = _options(kwargs.pop("q_options", {}))
    return list(args) if isinstance(args, tuple) else [args], kwargs, options


def _keywords(text: str) -> dict[str, Any]:
    """Return keyword arguments that are written as a dict, or as ``a=1, b=2``."""
    if text.lstrip().startswith("{"):
        return dict(ast.literal_eval(text))
    call: Any = ast.parse(f"f({text})", mode="eval").body
    return {each.arg: ast.literal_eval(each.value) for each in call.keywords}


def _times(row: Any) -> dict[str, Any]:
    at, kind = row.next_run, row.schedule_type
    if kind == "C":
        return {"cron": _cron(row.cron or "")}
    if kind == "I":
        return {"every": timedelta(minutes=row.minutes or 1), "starts_at": at}
    if kind in INTERVALS:
        return {"every": INTERVALS[kind], "starts_at": at}
    if settings.USE_TZ:
        at = timezone.localtime(at)
    clock = f"{at.minute} {at.hour}"
    if kind == "D":
        return {"cron": f"{clock} * * *"}
    if kind == "W":
        return {"cron": f"{clock} * * {at.isoweekday() % 7}"}
    if at.day > LAST_DAY:
        raise Unfit(f"Day {at.day} is not in each month. Make it here with L, the last day.")
    step = {"M": 1, "BM": 2, "Q": 3, "Y": 12}[kind]
    months = ",".join(str(each) for each in range((at.month - 1) % step + 1, 13, step))
    return {"cron": f"{clock} {at.day} {'*' if step == 1 else months} *"}


def _cron(expression: str) -> str:
    """Return an expression, whose sixth field is seconds, as one that means the same here."""
    fields = expression.split()
    check_days(f"cron={expression!r}", fields[:5])
    return " ".join([*fields[5:], *fields[:5]]) if len(fields) == 6 else expression
