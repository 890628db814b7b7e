from django_dbqueue.routers import QueueRouter


class TestRouter(QueueRouter):
    """The queue's tables in both databases, everything else in the first."""

    def allow_migrate(self, db, app_label, **hints):
        decided = super().allow_migrate(db, app_label, **hints)
        return db == "default" if decided is None else decided
