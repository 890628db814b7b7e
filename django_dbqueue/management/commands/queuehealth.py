"""``manage.py queuehealth``: whether the queue works, for cron, containers and monitoring."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandParser, no_translations

from ...doctor.finding import Severity, one_line
from ...doctor.runner import OF_A_VENDOR, examine, name_of
from .checkqueue import (
    EXIT_CODES,
    chosen_databases,
    exit_by,
    unknown_if_it_fails,
    with_exit_code_unknown,
)

OF_THE_DATABASE = {name_of(check) for checks in OF_A_VENDOR.values() for check in checks}
# The most serious first, as their exit codes are chosen.
ORDER = [*EXIT_CODES]


class Command(BaseCommand):
    help = (
        "Say whether the queue works: its processes, late jobs, overdue recurring tasks, failures. "
        "The exit code is 0 if all is well, 1 with warnings, 2 if jobs do not run, and 3 if the "
        "queue could not be checked. checkqueue examines the database too, which takes longer."
    )
    requires_system_checks = ()

    def create_parser(self, *args: Any, **kwargs: Any) -> CommandParser:
        return with_exit_code_unknown(super().create_parser(*args, **kwargs))

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", help="Check only this database, an alias in DATABASES.")
        parser.add_argument("--backend", help="Check only the database of this alias in TASKS.")
        parser.add_argument("--json", action="store_true", help="Write the problems as JSON.")

    # Monitoring and its searches need the same words in each project.
    @no_translations
    @unknown_if_it_fails
    def handle(self, *args: object, **options: Any) -> None:
        found = [
            (each.alias, check, one)
            for each in chosen_databases(options["database"], options["backend"])
            for check, one in examine(each, OF_THE_DATABASE)
            if one.severity
        ]
        found.sort(key=lambda it: ORDER.index(it[2].severity or Severity.WARNING))
        if options["json"]:
            problems = [
                {"database": alias, "check": check, "severity": one.severity, "what": one.what}
                for alias, check, one in found
            ]
            self.stdout.write(json.dumps(problems, indent=1))
        else:
            self._print([(one.severity, f"{alias}: {one.what}") for alias, _, one in found])
        exit_by([one for _, _, one in found])

    def _print(self, problems: list[tuple[Severity | None, str]]) -> None:
        for severity, what in problems:
            self.stdout.write(f"{severity.name if severity else ''}: {one_line(what)}")
        if not problems:
            self.stdout.write("OK: no problem was found.")
