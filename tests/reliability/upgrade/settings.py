"""A project that two versions of the queue serve: of the tests' own settings it has nothing, as these change with the code."""

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
# What is meant to fail is not to be in the log: on Django 5.2 no handler of Django's own takes these lines.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"none": {"class": "logging.NullHandler"}},
    "loggers": {"django_tasks": {"handlers": ["none"], "propagate": False}},
}
