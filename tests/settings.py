"""One project for the tests, on the database that ``DATABASE_URL`` names; without it, on SQLite in a file."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import django
import environ

env = environ.Env()

BASE_DIR = Path(__file__).parent.parent
if "DBQUEUE_SCRATCH" not in os.environ:
    # Inherited by the processes that tests start.
    os.environ["DBQUEUE_SCRATCH"] = tempfile.mkdtemp(prefix="dbqueue-")
    atexit.register(shutil.rmtree, os.environ["DBQUEUE_SCRATCH"], ignore_errors=True)
SCRATCH = os.environ["DBQUEUE_SCRATCH"]


def database(suffix: str) -> dict:
    config = (
        env.db("DATABASE_URL", default="")
        if env.str("DATABASE_URL", "")
        else env.db_url_config(f"sqlite:///{SCRATCH}/queue.sqlite3")
    )
    config["NAME"] += suffix
    config["TEST"] = {"NAME": f"{config['NAME']}_test"}
    if env.bool("DBQUEUE_IN_TEST_DATABASE", default=False):
        # A process that a test has started works on the test's own data. Tests that run beside each other have their own.
        beside = env.str("PYTEST_XDIST_WORKER", "")
        config["NAME"] = f"{config['TEST']['NAME']}_{beside}" if beside else config["TEST"]["NAME"]
    if config["ENGINE"] == "django.db.backends.sqlite3":
        config["OPTIONS"] = {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
        }
    if config["ENGINE"] == "django.db.backends.mysql":
        config["OPTIONS"] = {"charset": "utf8mb4"}
    return config


SECRET_KEY = "only for tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TIME_ZONE = "Asia/Kathmandu"
DATABASES = {"default": database(""), "other": database("_other")}
DATABASE_ROUTERS = ["tests.routers.TestRouter"]
# A theme of the admin to test the pages with: unfold, jazzmin or grappelli.
THEME = env.list("ADMIN_THEME", default=[])
ADMIN = [
    *THEME,
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
]
# Hundreds of processes are started, and importing these takes a third of each start.
INSTALLED_APPS = [
    *([] if env.bool("DBQUEUE_WITHOUT_ADMIN", default=False) else ADMIN),
    "django_dbqueue",
    "tests",
]
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")
# Thousands of users are made: the default hasher takes a quarter of a second for each.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
TASKS = {
    "default": {
        "BACKEND": "django_dbqueue.backend.DatabaseBackend",
        "QUEUES": [],
        "OPTIONS": {"database": "default", **env.json("DBQUEUE_OPTIONS", default={})},
    },
    "other": {
        "BACKEND": "django_dbqueue.backend.DatabaseBackend",
        "QUEUES": [],
        "OPTIONS": {"database": "other"},
    },
}
