"""The settings of the project with Celery."""

from celery.schedules import crontab

CELERY_BROKER_URL = "memory://"
CELERY_RESULT_BACKEND = "cache+memory://"
CELERY_TASK_DEFAULT_QUEUE = "default"
CELERY_TASK_ROUTES = {
    "celery_project.tasks.confirm": {"queue": "mail"},
    "celery_project.tasks.remind": {"queue": "mail"},
    "celery_project.tasks.pay": {"queue": "payments"},
}
CELERY_TASK_SOFT_TIME_LIMIT = 300
CELERY_TIMEZONE = "Europe/Berlin"
CELERY_BEAT_SCHEDULE = {
    "clean up": {
        "task": "shop.clean_up",
        "schedule": crontab(minute=30, hour=3),
        "kwargs": {"days": 7},
    },
    "remind": {
        "task": "celery_project.tasks.remind",
        "schedule": crontab(hour="8-18/2", minute=[0, 30], day_of_week="mon-fri"),
        "args": ("ada@example.com",),
        "options": {"priority": 5},
    },
    "invoice": {
        "task": "celery_project.tasks.invoice",
        "schedule": crontab(0, 6, day_of_month="1,15"),
    },
    "plan": {
        "task": "celery_project.tasks.invoice",
        "schedule": crontab(0, 8, day_of_week="monday,Friday", month_of_year="march-april"),
    },
}
