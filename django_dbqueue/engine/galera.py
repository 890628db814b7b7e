"""Galera, where each node has its own locks.

The later COMMIT detects a row that two nodes have written at the same time.
"""

from __future__ import annotations

from typing import Any, TypeVar

from django.db import connections, models

M = TypeVar("M", bound=models.Model)


def is_cluster(database: str) -> bool:
    """Return whether the calling thread's connection is to a node of a Galera cluster."""
    connection: Any = connections[database]
    if connection.vendor != "mysql":
        return False
    if not hasattr(connection, "dbqueue_is_cluster"):
        with connection.cursor() as cursor:
            cursor.execute("SHOW VARIABLES LIKE 'wsrep_on'")
            connection.dbqueue_is_cluster = (cursor.fetchone() or ("", ""))[1] == "ON"
    return bool(connection.dbqueue_is_cluster)


def certify(rows: models.QuerySet[M], there: dict[str, object], back: dict[str, object]) -> None:
    """Extend the lock of these rows to all nodes of a cluster.

    Of two transactions that hold the lock at the same time, one fails. A row that is only locked
    is not compared, nor is a row that is set to its old value. So each row is changed ``there``
    and ``back``.
    """
    if is_cluster(rows.db):
        rows.update(**there)
        rows.update(**back)
