"""Django project of every measured system.

``BENCH_SYSTEM`` names the system, ``DATABASE_URL`` its database.
"""

import environ

from ..systems import system

env = environ.Env()

BENCH_SYSTEM = env.str("BENCH_SYSTEM")
_system = system(BENCH_SYSTEM)

SECRET_KEY = "only for benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
_database = env.db("DATABASE_URL") | {"CONN_MAX_AGE": _system.conn_max_age}
if _system.pool:
    _database.setdefault("OPTIONS", {})["pool"] = _system.pool
if env("DATABASE_URL").startswith("sqlite"):
    # The options that this project's page on operations recommends.
    _database["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
        "timeout": 20,
    }
DATABASES = {"default": _database}
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "benchmarks.project",
    *_system.apps,
]
globals().update(_system.settings)
