"""``manage.py queue``: what is in a queue, and an operator's actions, in a terminal or a script."""

from __future__ import annotations

import difflib
import getpass
import json
import os
import socket
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.apps import apps
from django.core.management.base import BaseCommand, CommandError, no_translations
from django.db import InterfaceError, OperationalError, connections
from django.utils import timezone

from ...backend import DatabaseBackend
from ...command_line import debugging, listings, moving, pending, selection
from ...command_line.importing import BUILT_IN, Mover
from ...command_line.output import as_json, as_list, as_local, as_table, terminal_width
from ...command_line.sources import SOURCES
from ...command_line.sources.source import Unfit
from ...compat import InvalidTask, task_backends
from ...contrib import operations
from ...engine import row_operations
from ...engine.operations import VERBS
from ...models import Job, Operation, Queue, TaskState
from ...models.enums import UNFINISHED
from ...registry import discover, tasks_in
from ...runtime import alert_delivery

JOBS = {
    "retry": (Operation.Verb.RETRY, "Run failed and discarded jobs again, with all attempts."),
    "discard": (Operation.Verb.DISCARD, "Discard waiting and failed jobs."),
    "stop": (Operation.Verb.STOP, "Stop running jobs; they become discarded."),
    "run-now": (Operation.Verb.RUN_NOW, "Run scheduled jobs now, among them waiting retries."),
}
# To the screen: the cursor to its first place, and clear all behind.
HOME, CLEAR = "\x1b[H", "\x1b[J"
SHOWN_IN_TOP = 15
LONGEST_REASON = 200
LARGEST_LIMIT = 10**9
REASON = "Shown in the list of operations."


class Command(BaseCommand):
    help = "Show what is in the queue, and change it. Each action has help: queue retry --help."

    # What is in the queue is shown even if parts of the project are misconfigured.
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

        def add(name: str, text: str, more: str = "") -> ArgumentParser:
            action: ArgumentParser = actions.add_parser(
                name, help=text, description=f"{text} {more}".strip()
            )
            action.add_argument("--backend", metavar="ALIAS", help="A backend of TASKS.")
            action.add_argument("--json", action="store_true", help="Write JSON.")
            return action

        add("stats", "Show the numbers of jobs by state, of workers and of failures.")
        add("queues", "Show the queues with their jobs, workers and pauses.")
        add("workers", "Show the processes, with their jobs and heartbeats.")
        add("recurring", "Show the recurring tasks with their next times.")
        jobs = add("jobs", "Show the newest jobs, or those that pass all filters.")
        selection.add_filters(jobs)
        jobs.add_argument("--limit", type=_whole, default=20, metavar="N", help="Default: 20.")
        failures = add("failures", "Show the open failures, the last one first.")
        failures.add_argument("--all", action="store_true", help="The closed ones too.")
        failures.add_argument("--limit", type=_whole, default=20, metavar="N", help="Default: 20.")
        alerts = add("alerts", "Show the problems that OPTIONS['alerts'] reports.")
        alerts.add_argument("--limit", type=_whole, default=20, metavar="N", help="Default: 20.")
        alerts.add_argument("--test", action="store_true", help="Send each target a test alert.")
        add("show", "Show a job with its attempts.").add_argument("id", type=UUID)
        enqueue = add("enqueue", "Enqueue a task.")
        enqueue.add_argument("task", metavar="PATH", help="The task: shop.tasks.confirm.")
        enqueue.add_argument(
            "--args", dest="arguments", default="[]", metavar="JSON", help="'[17]'"
        )
        enqueue.add_argument(
            "--kwargs", dest="keywords", default="{}", metavar="JSON", help="'{\"copy\": true}'"
        )
        enqueue.add_argument("--queue", help="Another queue than the task's own.")
        enqueue.add_argument("--priority", type=int, help="From -100 to 100.")
        enqueue.add_argument("--key", help="The key of the job.")
        enqueue.add_argument("--after", type=_seconds, metavar="SECONDS", help="Run it later.")
        for name, (_verb, text) in JOBS.items():
            _add_selection(add(name, text))
        moved = add(
            "move",
            "Move jobs to another backend, in another database.",
            "Those that wait, unless --state or ids say otherwise. Workers of both may run "
            "meanwhile: a job runs in one of the two. What cannot be moved stays.",
        )
        way = moved.add_mutually_exclusive_group(required=True)
        way.add_argument("--to", metavar="ALIAS", help="The other backend.")
        way.add_argument(
            "--abandon",
            metavar="ALIAS",
            help="End interrupted moves to a backend whose database is gone for good: their jobs "
            "run here. Those that have arrived there run twice if it comes back.",
        )
        _add_selection(moved)
        for name, text in (
            ("pause", "Claim no jobs of queues or tasks; running jobs go on."),
            ("resume", "Claim the jobs of paused queues or tasks again."),
        ):
            verb = add(name, text)
            verb.add_argument("names", nargs="+", type=selection.as_text, metavar="NAME")
            verb.add_argument("--task", action="store_true", help="The names are those of tasks.")
            verb.add_argument("--reason", type=_reason, default="", help=REASON)
            if name == "pause":
                verb.add_argument(
                    "--for", dest="span", type=_seconds, metavar="SECONDS", help="Then resume."
                )
        run = add(
            "run",
            "Run the task of a job in this process, for a debugger.",
            "The job itself stays as it is, and no attempt is recorded: to run it again, retry it. "
            "Timeouts and limits do not apply. What the task does, such as sending a mail, is "
            "done.",
        )
        run.add_argument("id", type=UUID)
        run.add_argument("--pdb", action="store_true", help="Debug where the task fails.")
        check = add(
            "check", "Before a deployment: check that this code can run the jobs that wait."
        )
        check.add_argument("--pending", action="store_true", required=True, help="Unfinished jobs.")
        moved = add(
            "import",
            "Move the jobs and schedules that wait in another queue here.",
            "Its application must be installed. Workers of both may run meanwhile: a job is in one "
            "of the two. What cannot be moved stays there.",
        )
        moved.add_argument("source", choices=sorted(SOURCES), metavar="QUEUE")
        moved.add_argument(
            "--rename",
            type=_renamed,
            action="append",
            default=[],
            metavar="OLD=NEW",
            help="Another path of a task here; may be repeated.",
        )
        moved.add_argument("--dry-run", action="store_true", help="Change nothing.")
        top = add("top", "Show the queues and the running jobs, again and again.")
        top.add_argument("--every", type=_seconds, default=2.0, metavar="SECONDS", help="2.")
        top.add_argument("--once", action="store_true", help="Show them once.")

    # Scripts need the same words in each project.
    @no_translations
    def handle(self, *args: object, **options: Any) -> None:
        action: Callable[..., None] = getattr(self, f"_{options['action'].replace('-', '_')}")
        try:
            backend = _backend(options)
            discover(backend.config.task_modules)
            action(backend, options)
            sys.stdout.flush()
        except BrokenPipeError:  # The reader, such as head, has enough.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (InterfaceError, OperationalError):
            _check_connections()
            raise

    def _stats(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        self._show_one(listings.stats(backend), options)

    def _queues(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        self._show_rows(listings.queues(backend), options)

    def _workers(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        self._show_rows(listings.workers(backend), options)

    def _recurring(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        self._show_rows(listings.recurring(backend), options)

    def _jobs(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        found = selection.filtered(backend, options)
        self._show_rows(listings.jobs(found, backend, options["limit"]), options)

    def _failures(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        found = listings.failures(backend, options["limit"], closed=options["all"])
        self._show_rows(found, options)

    def _alerts(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        if not options["test"]:
            self._show_rows(listings.alerts(backend, options["limit"]), options)
            return
        if not (targets := backend.config.alert_targets):
            raise CommandError(
                f"TASKS[{backend.alias!r}]['OPTIONS'] has no 'alerts'. Give such as "
                "'alerts': [{'mail': 'ADMINS'}]."
            )
        found = [{"target": each.name, "error": alert_delivery.test(each)} for each in targets]
        self._show_rows(found, options)
        if any(each["error"] for each in found):
            sys.exit(1)

    def _show(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        if (found := _job(options["id"], backend)) is None:
            raise CommandError(selection.missing([options["id"]], backend))
        row = listings.job(found, backend)
        if options["json"]:
            self.stdout.write(as_json(row))
            return
        attempts = row.pop("attempts")
        self.stdout.write(as_list(_without_empty(row)))
        for attempt in attempts:
            self.stdout.write("\n" + as_list(_without_empty(attempt)))

    def _enqueue(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        try:
            task: Any = _task(options["task"], backend)
            changes = {
                "queue_name": options["queue"],
                "priority": options["priority"],
                "key": options["key"],
                "run_after": options["after"] and timedelta(seconds=options["after"]),
                "backend": options["backend"],
            }
            task = task.using(**_without_empty(changes))
            args = _json("--args", options["arguments"], list)
            kwargs = _json("--kwargs", options["keywords"], dict)
            result = task.enqueue(*args, **kwargs)
        except (InvalidTask, TypeError, ValueError) as error:
            raise CommandError(str(error)) from error
        self._say({"id": result.id}, result.id, options)

    def _change(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        verb, _text = JOBS[options["action"]]
        jobs = selection.selected(backend, options)
        if options["dry_run"]:
            number = VERBS[verb].eligible(jobs, "").count()
            said = f"{options['action']} would change {_jobs(number)}."
            self._say({"would_change": number}, said, options)
            return
        # All at once, here: without a backend, no job of the queue goes on with it.
        done = operations.start(
            jobs, verb, "", None, scope=_scope(options), actor=_actor(), reason=options["reason"]
        )
        said = f"{options['action']} changed {_jobs(done.changed)}. It is operation {done.pk}."
        self._say({"changed": done.changed, "operation": done.pk}, said, options)

    _retry = _discard = _stop = _run_now = _change

    def _move(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        if gone := options["abandon"]:
            if selection.is_given(options):
                raise CommandError(
                    f"--abandon ends all interrupted moves to {gone!r}: give no ids, no filters, "
                    "and not --all."
                )
            number = moving.give_back(backend.database, gone, dry=options["dry_run"])
            verb = "would" if options["dry_run"] else "will"
            self._say({"jobs": number}, f"{_jobs(number)} {verb} run here.", options)
            return
        target = _backend({"backend": options["to"]})
        if target.database == backend.database:
            raise CommandError(
                f"The backends {backend.alias!r} and {target.alias!r} have the same database, "
                f"{target.database!r}: there is nothing to move. --backend names the first."
            )
        jobs = selection.selected(backend, options)
        if not options["ids"] and options["state"] is None:
            jobs = jobs.filter(state__in=UNFINISHED)
        found = moving.move(
            jobs,
            target,
            dry=options["dry_run"],
            scope=_scope(options),
            actor=_actor(),
            reason=options["reason"],
        )
        self._show_rows(found, options)
        if any(row["problem"] for row in found):
            sys.exit(1)

    def _pause(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        table: Any = TaskState if options["task"] else Queue
        rows = table.objects.using(backend.database)
        try:
            named = rows.named(*options["names"])
        except ValueError as error:
            raise CommandError(str(error)) from error
        if options["action"] == "pause":
            span = options["span"] and timedelta(seconds=options["span"])
            verb, change = Operation.Verb.PAUSE, lambda: named.pause(span)
        else:
            verb, change = Operation.Verb.RESUME, named.resume
        done = row_operations.record(
            named, verb, change, scope=_scope(options), actor=_actor(), reason=options["reason"]
        )
        number = done.changed if done else 0
        said = f"{options['action']} changed {number} of {len(options['names'])}."
        self._say({"changed": number, "operation": done and done.pk}, said, options)

    _resume = _pause

    def _run(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        found = debugging.run(options["id"], backend, self.stderr if options["pdb"] else None)
        text = f"The job {found['id']} is unchanged: {found['state'].upper()}."
        if "returned" in found:
            text = f"{found['task']} returned {found['returned']!r}.\n{text}"
        self._say(found, text, options)

    def _check(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        found = pending.unfit(backend)
        if options["json"] or found:
            self._show_rows(found, options)
        else:
            self.stdout.write("This code can run all jobs that wait, and all recurring tasks.")
        if found:
            sys.exit(1)

    def _import(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        source = SOURCES[options["source"]]()
        if source.app not in apps.app_configs:
            raise CommandError(
                f"{source.name} is not installed here. Keep it in INSTALLED_APPS until its jobs "
                "are moved."
            )
        try:
            mover = Mover(source, backend, dict(options["rename"]), dry=options["dry_run"])
            found = mover.move()
        except Unfit as error:
            raise CommandError(str(error)) from None
        self._show_rows(found, options)
        if any(row["problem"] and row["kind"] != BUILT_IN for row in found):
            sys.exit(1)

    def _top(self, backend: DatabaseBackend, options: Mapping[str, Any]) -> None:
        while True:
            running = Job.objects.using(backend.database).running()
            now, width = as_local(timezone.now()), terminal_width()
            rows = {
                "queues": listings.queues(backend),
                "running": listings.jobs(running, backend, SHOWN_IN_TOP),
                "failures": listings.failures(backend, 5, closed=False),
            }
            if options["json"]:
                self.stdout.write(as_json({"at": now, **rows}, indent=None))
            else:
                parts = [
                    f"{title.capitalize()}:\n{as_table(each, width=width)}"
                    for title, each in rows.items()
                ]
                title = f"{now:%H:%M:%S}  backend {backend.alias}, every {options['every']:g} s"
                if not options["once"]:
                    self.stdout.write(HOME + CLEAR, ending="")
                self.stdout.write("\n\n".join([title, *parts]))
            if options["once"]:
                return
            self.stdout.flush()
            try:
                time.sleep(options["every"])
            except KeyboardInterrupt:
                return

    def _show_one(self, row: dict[str, Any], options: Mapping[str, Any]) -> None:
        self.stdout.write(as_json(row) if options["json"] else as_list(row))

    def _show_rows(self, rows: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
        self.stdout.write(as_json(rows) if options["json"] else as_table(rows))

    def _say(self, found: dict[str, Any], text: str, options: Mapping[str, Any]) -> None:
        self.stdout.write(as_json(found) if options["json"] else text)


def _check_connections() -> None:
    """Raise CommandError if a database that the command has used is unreachable."""
    for connection in connections.all(initialized_only=True):
        connection.close_if_unusable_or_obsolete()
        try:
            connection.ensure_connection()
        except (InterfaceError, OperationalError) as error:
            raise CommandError(
                f"The database {connection.alias!r} is unreachable: {str(error).strip()}"
            ) from error


def _backend(options: Mapping[str, Any]) -> DatabaseBackend:
    """Return the named backend; without a name, the one that has the job, or the first one."""
    alias = options["backend"]
    found = [
        each
        for each in map(task_backends.__getitem__, task_backends)
        if isinstance(each, DatabaseBackend) and alias in (None, each.alias)
    ]
    if not found:
        raise CommandError(f"TASKS has no DatabaseBackend {alias or ''}".rstrip() + ".")
    pk = next(iter(options.get("ids") or ()), options.get("id"))
    return next((each for each in found if pk is None or _job(pk, each)), found[0])


def _job(pk: UUID, backend: DatabaseBackend) -> Job | None:
    return Job.objects.using(backend.database).filter(pk=pk).first()


def _task(path: str, backend: DatabaseBackend) -> Any:
    known = tasks_in(backend.config.task_modules)
    if path in known:
        return known[path]
    near = difflib.get_close_matches(path, known, n=1)
    hint = f"Did you mean {near[0]}?" if near else "Give the path of a function with @task."
    raise CommandError(f"There is no task {path!r}. {hint}")


def _jobs(number: int) -> str:
    return f"{number:,} job{'s' * (number != 1)}"


def _json(flag: str, text: str, kind: type) -> Any:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise CommandError(f"{flag}: {text!r} is not JSON: {error}") from None
    if not isinstance(found, kind):
        wanted = "a list, such as '[17]'" if kind is list else "an object, such as '{\"a\": 17}'"
        raise CommandError(f"{flag}: {text!r} is not {wanted}.")
    return found


def _scope(options: Mapping[str, Any]) -> str:
    """Return the command as text, for the list of operations."""
    words = ["manage.py queue", options["action"]]
    for name in ("ids", "names"):
        words += map(str, options.get(name) or ())
    for name in (*selection.FILTERS, "all"):
        if (value := options.get(name)) not in (None, False):
            words.append(f"--{name}" if value is True else f"--{name}={value}")
    return " ".join(words)


def _add_selection(verb: ArgumentParser) -> None:
    verb.add_argument("ids", nargs="*", type=UUID, metavar="ID")
    selection.add_filters(verb)
    verb.add_argument("--all", action="store_true", help="All jobs that it can change.")
    verb.add_argument("--dry-run", action="store_true", help="Count the jobs only.")
    verb.add_argument("--reason", type=_reason, default="", help=REASON)


def _without_empty(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value not in (None, "", {})}


def _actor() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container's user without a name.
        user = "?"
    return f"{user}@{socket.gethostname()}"[:150]


def _whole(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= LARGEST_LIMIT:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 to {LARGEST_LIMIT:,}.")
    return int(text)


def _renamed(text: str) -> tuple[str, str]:
    old, sign, new = text.partition("=")
    if not (old and sign and new):
        raise ArgumentTypeError(f"{text!r} is not such as old.tasks.send=shop.tasks.send.")
    return old, new


def _reason(text: str) -> str:
    selection.as_text(text)
    if len(text) > LONGEST_REASON:
        raise ArgumentTypeError(
            f"{text[:20]!r}… has {len(text)} characters, more than {LONGEST_REASON}."
        )
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 10**9:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds above 0.")
    return seconds
