"""Settings for two versions of the package. The tests' own settings change with the code."""

import json
import os

import django

SECRET_KEY = "only for tests"
DATABASES = json.loads(os.environ["UPGRADE_DATABASES"])
INSTALLED_APPS = [
    "django_dbqueue",
    "upgrade",
    *(["django_tasks"] if django.VERSION < (6, 0) else []),
]
TASKS = {
    "default": {
        "BACKEND": "django_dbqueue.backend.DatabaseBackend",
        "OPTIONS": {
            "threads": 4,
            "poll_interval": 0.2,
            **json.loads(os.environ["UPGRADE_OPTIONS"]),
        },
    },
}
# Intended failures are not logged: on Django 5.2 no handler of Django's takes these lines.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"none": {"class": "logging.NullHandler"}},
    "loggers": {"django_tasks": {"handlers": ["none"], "propagate": False}},
}
