"""Galera, where each node has locks of its own: what two nodes have written at a time, the COMMIT of the later one finds."""

from __future__ import annotations

from typing import Any

from django.db import connections, models


def is_cluster(database: str) -> bool:
    """Whether the calling thread's connection is to a node of a Galera cluster."""
    connection: Any = connections[database]
    if connection.vendor != "mysql":
        return False
    if not hasattr(connection, "dbqueue_is_cluster"):
        with connection.cursor() as cursor:
            cursor.execute("SHOW VARIABLES LIKE 'wsrep_on'")
            connection.dbqueue_is_cluster = (cursor.fetchone() or ("", ""))[1] == "ON"
    return bool(connection.dbqueue_is_cluster)


def certify(rows: models.QuerySet[Any], there: dict[str, Any], back: dict[str, Any]) -> None:
    """On a cluster, have the lock of these rows hold over all nodes: of two transactions that had it at a time, one fails.

    A row that is only locked is not compared, nor one that is set to what it was. So each is changed ``there`` and ``back``.
    """
    if is_cluster(rows.db):
        rows.update(**there)
        rows.update(**back)
