"""Before the workers start: tables, somebody who may sign in, and jobs."""

from __future__ import annotations

from django.contrib.auth import get_user_model
from django.core.management import call_command

from django_dbqueue.models import Job

from .. import library
from ..models import Module
from ..tasks import index_file
from .console import say
from .interrupts import deferred

NAME = PASSWORD = "demo"


def prepare() -> None:
    """Have all that the workers and the pages need; what is there already stays as it is."""
    with deferred():
        call_command("migrate", verbosity=0)
    if make_superuser():
        say(f"The superuser {NAME} with the password {PASSWORD} was made.")
    new = enqueue_new()
    say(f"{new:,} files were enqueued." if new else "No new files: each of the library's has its job.")


def make_superuser() -> bool:
    """Make one if there is none. Returns whether there was none."""
    users = get_user_model()._default_manager
    if users.filter(is_superuser=True).exists():
        return False
    users.create_superuser(NAME, password=PASSWORD)
    return True


def enqueue_new() -> int:
    """Enqueue the files that are not indexed and have no job, whatever became of it. Returns how many."""
    arguments = Job.objects.filter(task=index_file.module_path).values_list("args", flat=True)
    known = {args[0] for args in arguments if args} | set(Module.objects.values_list("path", flat=True))
    new = [(path,) for path in library.paths() if path not in known]
    return len(index_file.enqueue_many(new))
