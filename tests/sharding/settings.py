import environ

from tests.settings import MIDDLEWARE, TEMPLATES  # noqa: F401

env = environ.Env()
SECRET_KEY = "only for tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": env.db_url("PROJECT_DATABASE"),
    "queue_0": env.db_url("SHARD_0"),
    "queue_1": env.db_url("SHARD_1"),
}
DATABASE_ROUTERS = ["django_dbqueue.routers.QueueRouter"]
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django_dbqueue",
    "tests.sharding",
]
ROOT_URLCONF = "tests.sharding.urls"
STATIC_URL = "static/"
ALLOWED_HOSTS = ["testserver"]
TASKS = {
    alias: {
        "BACKEND": "django_dbqueue.backend.DatabaseBackend",
        "OPTIONS": {"database": database, "give_up_after": 120},
    }
    for alias, database in [("default", "queue_0"), ("shard_1", "queue_1")]
}
