"""Preparation before the workers start: tables, a superuser, and jobs."""

from __future__ import annotations

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.template.defaultfilters import pluralize

from ..tasks import scan
from .console import say
from .interrupts import deferred

NAME = PASSWORD = "demo"


def prepare() -> None:
    """Create everything that the workers and the pages need. Existing data is kept."""
    with deferred():
        call_command("migrate", verbosity=0)
    if make_superuser():
        say(f"The superuser {NAME} with the password {PASSWORD} was created.")
    changed = scan.call()
    if changed:
        say(f"{changed:,} new or changed file{pluralize(changed)} enqueued.")
    else:
        say("No file is new or has changed since the last scan.")


def make_superuser() -> bool:
    """Create a superuser if there is none. Returns True if it was created."""
    users = get_user_model()._default_manager
    if users.filter(is_superuser=True).exists():
        return False
    users.create_superuser(NAME, password=PASSWORD)
    return True
