"""A backend whose jobs are in the memory of the test's process, beside all databases."""

from __future__ import annotations

import atexit
import sqlite3
from collections.abc import Iterator
from functools import cached_property
from threading import Lock
from typing import Any

from django.apps import apps
from django.db import connections
from django.db.models import Model
from django.db.utils import ConnectionHandler
from django.dispatch import receiver
from django.test.signals import setting_changed

from ...backend import DatabaseBackend
from ...models import Job

PREFIX = "dbqueue_memory_"
_lock = Lock()
# By alias. SQLite drops a database in memory with its last connection: these are never closed.
_keepers: dict[str, sqlite3.Connection] = {}


class InMemoryBackend(DatabaseBackend):
    """A backend for tests that may not use a database: its jobs are in the memory of their process.

    It is a DatabaseBackend on SQLite in every other respect: retries, times, keys, limits, batches
    and pipelines work, and the helpers run its jobs. A change of the setting TASKS, such as by
    ``override_settings``, deletes the jobs. ``runqueue`` without ``--embedded`` refuses it.
    """

    @cached_property
    def database(self) -> str:
        alias = f"{PREFIX}{self.alias}"
        with _lock:
            if alias not in connections.settings:
                _create(alias)
        return alias


class _Settings(dict[str, Any]):
    """The settings of DATABASES, and of those in memory, which are not listed.

    Django refuses, closes, flushes and drops the databases of a test that it finds listed.
    """

    def __iter__(self) -> Iterator[str]:
        return (alias for alias in super().__iter__() if not alias.startswith(PREFIX))


def clear() -> None:
    """Delete all rows of the databases in memory."""
    # Not by Django's connections, which an event loop may not use.
    with _lock:
        for keeper in _keepers.values():
            with keeper:
                for model in _models():
                    keeper.execute(f'DELETE FROM "{model._meta.db_table}"')


@receiver(setting_changed)
def _clear_with_settings(*, setting: str, **_rest: object) -> None:
    if setting == "TASKS":
        clear()


def _models() -> list[type[Model]]:
    every = apps.get_app_config(Job._meta.app_label).get_models()
    return [model for model in every if not model._meta.proxy]


def _create(alias: str) -> None:
    name = f"file:{alias}?mode=memory&cache=shared"
    given = {"ENGINE": __name__, "NAME": name, "TIME_ZONE": None}
    handler = ConnectionHandler({"default": {}, alias: given})
    connections.settings = _Settings({**connections.settings, alias: handler.settings[alias]})
    _keepers[alias] = keeper = sqlite3.connect(name, uri=True, check_same_thread=False)
    atexit.register(keeper.close)
    # Without migrations, which a project's database routers may not allow here.
    with connections[alias].schema_editor() as editor:
        for model in _models():
            editor.create_model(model)
