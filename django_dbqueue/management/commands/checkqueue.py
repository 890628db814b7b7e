"""``manage.py checkqueue``: recommended changes to the queue's databases, with reasons."""

from __future__ import annotations

import json
import sys
import textwrap
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from ...backend import DatabaseBackend
from ...compat import task_backends
from ...doctor.database import QueueDatabase, queue_databases
from ...doctor.finding import Finding, NotChecked
from ...doctor.runner import examine, names

Found = list[tuple[str, Finding | NotChecked]]


class Command(BaseCommand):
    help = (
        "Check the queue's databases and recommend changes, with reasons. "
        "The exit code is 1 if there are findings, and 0 otherwise."
    )
    # No system checks: the command checks the database even if other parts of the project are
    # misconfigured.
    requires_system_checks = ()

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

    def handle(self, *args: object, **options: Any) -> None:
        if unknown := set(options["ignore"]) - set(names()):
            raise CommandError(
                f"There is no check {', '.join(sorted(unknown))} to ignore. "
                f"Choose from {', '.join(names())}."
            )
        found = [
            (each, list(examine(each, options["ignore"])))
            for each in _databases(options["database"], options["backend"])
        ]
        if options["json"]:
            self.stdout.write(json.dumps([_as_json(*each) for each in found], indent=1))
        else:
            for each in found:
                self._print(*each)
        if any(isinstance(one, Finding) for _, those in found for _, one in those):
            sys.exit(1)

    def _print(self, database: QueueDatabase, found: Found) -> None:
        findings = [(name, one) for name, one in found if isinstance(one, Finding)]
        where = f"{database.alias} ({database.product})"
        self.stdout.write(
            f"{where}: {_count(len(findings))}",
            self.style.WARNING if findings else self.style.SUCCESS,
        )
        for number, (name, one) in enumerate(findings, 1):
            self.stdout.write(f"\n{_filled(f'{number}. ', one.what)} [{name}]")
            self.stdout.write(_filled("   Why: ", one.why))
            self.stdout.write(
                "   Do:  " + one.remedy.replace("\n", "\n        "), self.style.MIGRATE_LABEL
            )
        for name, skipped in [(name, one) for name, one in found if isinstance(one, NotChecked)]:
            self.stdout.write(f"\n{_filled('-  ', skipped.what)} [{name}]")
            if skipped.remedy:
                self.stdout.write(f"   Do:  {skipped.remedy}")
        self.stdout.write("")


def _databases(database: str | None, backend: str | None) -> list[QueueDatabase]:
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
            else "TASKS has no DatabaseBackend. Add one."
        )
    return found


def _count(number: int) -> str:
    return "no findings." if not number else f"{number} finding{'s' * (number > 1)}."


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
