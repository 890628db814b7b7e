"""``manage.py checkqueue``: recommended changes to the queue's databases, with reasons."""

from __future__ import annotations

import json
import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import wraps
from typing import Any, NoReturn, ParamSpec

from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    no_translations,
)

from ...backend import DatabaseBackend
from ...compat import task_backends
from ...core.documentation import reference
from ...doctor.database import QueueDatabase, queue_databases
from ...doctor.finding import Finding, NotChecked, Severity
from ...doctor.runner import examine, names

P = ParamSpec("P")
Found = list[tuple[str, Finding | NotChecked]]
# Exit codes of monitoring plugins; the first severity that a result has decides.
EXIT_CODES = {Severity.CRITICAL: 2, Severity.UNKNOWN: 3, Severity.WARNING: 1}


def unknown_if_it_fails(handle: Callable[P, None]) -> Callable[P, None]:
    """Have a command that fails end with UNKNOWN: Python's own exit code is that of WARNING."""

    @wraps(handle)
    def handle_or_fail(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            handle(*args, **kwargs)
        except CommandError:
            raise
        except Exception as error:
            raise CommandError(
                f"The queue could not be checked: {type(error).__name__}: {error}",
                returncode=EXIT_CODES[Severity.UNKNOWN],
            ) from error

    return handle_or_fail


class Command(BaseCommand):
    help = (
        "Check the queue's databases and recommend changes, with reasons. "
        "The exit code is 0 without findings, 1 with warnings, 2 if jobs do not run, and 3 if the "
        "queue could not be checked."
    )
    # No system checks: the command checks the database even if other parts of the project are
    # misconfigured.
    requires_system_checks = ()

    def create_parser(self, *args: Any, **kwargs: Any) -> CommandParser:
        return with_exit_code_unknown(super().create_parser(*args, **kwargs))

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", help="Check only this database, an alias in DATABASES.")
        parser.add_argument("--backend", help="Check only the database of this alias in TASKS.")
        parser.add_argument(
            "--ignore",
            action="append",
            default=[],
            metavar="NAME",
            help=f"Skip a check; may be repeated. The checks are {', '.join(names())}.",
        )
        parser.add_argument("--json", action="store_true", help="Write the findings as JSON.")

    # Monitoring and its searches need the same words in each project.
    @no_translations
    @unknown_if_it_fails
    def handle(self, *args: object, **options: Any) -> None:
        if unknown := set(options["ignore"]) - set(names()):
            raise CommandError(
                f"There is no check {', '.join(sorted(unknown))} to ignore. "
                f"Choose from {', '.join(names())}.",
                returncode=EXIT_CODES[Severity.UNKNOWN],
            )
        found = [
            (each, list(examine(each, options["ignore"])))
            for each in chosen_databases(options["database"], options["backend"])
        ]
        if options["json"]:
            self.stdout.write(json.dumps([_as_json(*each) for each in found], indent=1))
        else:
            for each in found:
                self._print(*each)
        exit_by([one for _, those in found for _, one in those])

    def _print(self, database: QueueDatabase, found: Found) -> None:
        findings = [(name, one) for name, one in found if isinstance(one, Finding)]
        findings.sort(key=lambda each: each[1].severity != Severity.CRITICAL)
        critical = sum(one.severity == Severity.CRITICAL for _, one in findings)
        unknown = [one.what for _, one in found if one.severity == Severity.UNKNOWN]
        where = f"{database.alias} ({database.product})"
        self.stdout.write(
            f"{where}: {unknown[0] if unknown and not critical else _count(findings, critical)}",
            self.style.WARNING if findings or unknown else self.style.SUCCESS,
        )
        for number, (name, one) in enumerate(findings, 1):
            marked = f"{name}, critical" if one.severity == Severity.CRITICAL else name
            self.stdout.write(f"\n{_filled(f'{number}. ', one.what)} [{marked}]")
            self.stdout.write(_filled("   Why: ", one.why))
            self.stdout.write(
                "   Do:  " + one.remedy.replace("\n", "\n        "), self.style.MIGRATE_LABEL
            )
        for name, skipped in [(name, one) for name, one in found if isinstance(one, NotChecked)]:
            self.stdout.write(f"\n{_filled('-  ', skipped.what)} [{name}]")
            if skipped.remedy:
                self.stdout.write(f"   Do:  {skipped.remedy}")
        if found:
            self.stdout.write(f"\nThe names in brackets are explained in {reference('errors')}.")
        self.stdout.write("")


def with_exit_code_unknown(parser: CommandParser) -> CommandParser:
    """Have wrong arguments end with UNKNOWN: argparse's own exit code is that of CRITICAL."""
    end = parser.exit

    def exit(status: int = 0, message: str | None = None) -> NoReturn:
        end(EXIT_CODES[Severity.UNKNOWN] if status == 2 else status, message)

    parser.exit = exit  # type: ignore[method-assign]
    return parser


def exit_by(results: Iterable[Finding | NotChecked]) -> None:
    """Exit with the code of the most serious result; return if there is none."""
    severities = {each.severity for each in results}
    for severity, code in EXIT_CODES.items():
        if severity in severities:
            sys.exit(code)


def chosen_databases(database: str | None, backend: str | None) -> list[QueueDatabase]:
    """Return the databases of the queue, or those of an alias. Raises CommandError without any."""
    backends = [
        each
        for each in map(task_backends.__getitem__, task_backends)
        if isinstance(each, DatabaseBackend)
    ]
    found = [
        each
        for each in queue_databases(
            backend_of for backend_of in backends if backend in (None, backend_of.alias)
        )
        if database in (None, each.alias)
    ]
    if not found:
        known = ", ".join(f"{each.alias} (in the database {each.database})" for each in backends)
        raise CommandError(
            f"No backend matches --backend={backend} --database={database}. "
            f"The backends are {known}."
            if backends
            else "TASKS has no DatabaseBackend. Add one.",
            returncode=EXIT_CODES[Severity.UNKNOWN],
        )
    return found


def _count(findings: list[tuple[str, Finding]], critical: int) -> str:
    of_these = f", {critical} critical" if critical else ""
    return f"{len(findings) or 'no'} finding{'s' * (len(findings) != 1)}{of_these}."


def _filled(first: str, text: str) -> str:
    return textwrap.fill(
        text, 110, initial_indent=first, subsequent_indent=" " * len(first), break_long_words=False
    )


def _as_json(database: QueueDatabase, found: Found) -> dict[str, object]:
    return {
        "database": database.alias,
        "vendor": database.connection.vendor,
        "findings": [
            {"check": name, **asdict(one)} for name, one in found if isinstance(one, Finding)
        ],
        "not_checked": [
            {"check": name, **asdict(one)} for name, one in found if isinstance(one, NotChecked)
        ],
    }
