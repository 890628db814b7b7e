"""A project that moves from another queue, named by IMPORT_FROM, to this one."""

import os

import environ

SOURCE = os.environ["IMPORT_FROM"]
SECRET_KEY = "only for tests"
USE_TZ = True
TIME_ZONE = "Europe/Berlin"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": environ.Env().db_url("IMPORT_DATABASE")}
if DATABASES["default"]["ENGINE"].endswith("sqlite3"):
    DATABASES["default"]["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "init_command": "PRAGMA journal_mode=WAL",
    }
if "IMPORT_QUEUE_DATABASE" in os.environ:
    # This queue in another database than the other one.
    DATABASES["queue"] = environ.Env().db_url("IMPORT_QUEUE_DATABASE")
    DATABASES["queue"].setdefault("OPTIONS", DATABASES["default"].get("OPTIONS", {}))
APPS = {
    "django-tasks-db": ["django_tasks_db"],
    "django-q2": ["django_q"],
    "procrastinate": ["procrastinate.contrib.django"],
    "dj-queue": ["dj_queue"],
    "steady-queue": ["steady_queue"],
    "django-ox": ["django_ox"],
    "django-celery-beat": ["django_celery_beat"],
}
BACKENDS = {
    "django-tasks-db": "django_tasks_db.DatabaseBackend",
    "dj-queue": "dj_queue.backend.DjQueueBackend",
    "steady-queue": "steady_queue.backend.SteadyQueueBackend",
    "django-ox": "django_ox.backend.OxBackend",
}
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    *APPS[SOURCE],
    "django_dbqueue",
    "tests.importing",
]
TASKS = {
    "default": {
        "BACKEND": "django_dbqueue.backend.DatabaseBackend",
        "QUEUES": ["default", "mail"] if SOURCE == "django-celery-beat" else [],
        "OPTIONS": {"database": "queue" if "queue" in DATABASES else "default"},
    }
}
if SOURCE in BACKENDS:
    TASKS["old"] = {"BACKEND": BACKENDS[SOURCE], "QUEUES": []}
Q_CLUSTER = {"name": "shop", "orm": "default", "retry": 60, "timeout": 30}
DBQUEUE_CELERY_BROKER = "redis"
