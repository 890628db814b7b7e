"""The settings of the project without Celery, as ``docs/from_celery.md`` says."""

from celery.schedules import crontab

DBQUEUE_CELERY_BROKER = "rabbitmq"
TASKS = {
    "default": {
        "BACKEND": "django_dbqueue.backend.DatabaseBackend",
        "QUEUES": ["default", "mail", "payments"],
        "OPTIONS": {
            "timeout": 300,
            "timeout_grace": 30,
            "recurring": {
                "clean up": {
                    "task": "celery_project.tasks.clean_up",
                    "cron": crontab(minute=30, hour=3),
                    "timezone": "Europe/Berlin",
                    "kwargs": {"days": 7},
                },
                "remind": {
                    "task": "celery_project.tasks.remind",
                    "cron": crontab(hour="8-18/2", minute=[0, 30], day_of_week="mon-fri"),
                    "timezone": "Europe/Berlin",
                    "args": ("ada@example.com",),
                    "priority": 5,
                },
                "invoice": {
                    "task": "celery_project.tasks.invoice",
                    "cron": crontab(0, 6, day_of_month="1,15"),
                    "timezone": "Europe/Berlin",
                },
                "plan": {
                    "task": "celery_project.tasks.invoice",
                    "cron": crontab(0, 8, day_of_week="monday,Friday", month_of_year="march-april"),
                    "timezone": "Europe/Berlin",
                },
            },
        },
    }
}
