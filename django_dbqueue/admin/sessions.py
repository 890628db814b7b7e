"""The PostgreSQL sessions of a hanged job: their statements, and what they wait for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from django.db import Error, connections, router, transaction
from django.utils.text import Truncator

from ..models import StackTrace
from . import formatting

# A session, and those that it waits for.
_QUERY = """
    SELECT pid, pid <> %(pid)s AS is_blocker, coalesce(usename, ''), application_name,
        coalesce(state, ''), coalesce(wait_event_type || ': ' || wait_event, ''), query,
        coalesce(extract(epoch FROM clock_timestamp() - query_start), 0)
    FROM pg_stat_activity
    WHERE pid = %(pid)s OR pid = ANY (pg_blocking_pids(%(pid)s))
    ORDER BY is_blocker, pid
    """
# Comments, identifiers, texts in quotes or between dollars, and long numbers. Texts, comments and
# long numbers may hold secrets.
_PARTS = re.compile(
    r"""(?P<name>"(?:[^"]|"")*"?)
    | --[^\n]* | /\*.*?(?:\*/|$)
    | \b[eE]'(?:\\.|''|[^'\\])*(?:'|$) | '(?:[^']|'')*(?:'|$)
    | \$(?P<tag>\w*)\$.*?(?:\$(?P=tag)\$|$)
    | \b\d{4,}\b""",
    re.DOTALL | re.VERBOSE,
)
_LONGEST = 2000


class Session(NamedTuple):
    """A session of the job, or one that it waits for."""

    database: str
    pid: int
    is_blocker: bool
    user: str
    application: str
    state: str
    waits_for: str
    query: str
    since: str


def sessions_of(stack: StackTrace | None) -> list[Session]:
    """Return the sessions that the thread of a hanged job had when its stack was taken."""
    found = stack.sessions if stack else {}
    return [session for alias, pid in found.items() for session in _read(str(alias), pid)]


def _read(alias: str, pid: Any) -> Iterator[Session]:
    if alias not in connections or not _is_here(connections[alias]):
        return
    try:
        # A request may be one transaction, which an error would end.
        with transaction.atomic(alias), connections[alias].cursor() as cursor:
            cursor.execute(_QUERY, {"pid": pid})
            rows = cursor.fetchall()
    except Error:  # Its page still shows the stack.
        return
    for own_pid, is_blocker, user, application, state, waits_for, query, seconds in rows:
        text = Truncator(without_literals(query)).chars(_LONGEST)
        since = formatting.duration(timedelta(seconds=max(0.0, float(seconds))))
        yield Session(alias, own_pid, is_blocker, user, application, state, waits_for, text, since)


def _is_here(connection: Any) -> bool:
    """Return whether a database is on the server that answers this page.

    Another server may be the cause of the trouble, and let the page wait.
    """
    own = connections[router.db_for_read(StackTrace)].settings_dict
    place = ("HOST", "PORT")
    same = all(connection.settings_dict.get(name) == own.get(name) for name in place)
    return connection.vendor == "postgresql" and same


def without_literals(query: str) -> str:
    """Return SQL without its texts, comments and long numbers, which may be hidden values."""
    return _PARTS.sub(lambda part: part["name"] or "…", query)
