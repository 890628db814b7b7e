from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DbQueueConfig(AppConfig):
    name = "django_dbqueue"
    label = "dbqueue"
    verbose_name = _("Job queue")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # The framework's checks and logging register on import; the backport's app need not be
        # installed.
        from . import checks, compat  # noqa: F401
