from django_dbqueue.routers import QueueRouter


class TestRouter(QueueRouter):
    """The queue's tables in both databases, everything else in the first."""

    def allow_migrate(self, db, app_label, **hints):
        decided = super().allow_migrate(db, app_label, **hints)
        return db == "default" if decided is None else decided


class ReplicaRouter:
    """As in Django's documentation: all is read from a replica. Here of the queue's tables alone, which are empty there.

    It allows no relation between them, as a router does that has forgotten those within an application.
    """

    def db_for_read(self, model, **hints):
        return "other" if model._meta.app_label == "dbqueue" else None

    def db_for_write(self, model, **hints):
        return "default" if model._meta.app_label == "dbqueue" else None

    def allow_relation(self, one, other, **hints):
        return {one._meta.app_label, other._meta.app_label} != {"dbqueue"}
