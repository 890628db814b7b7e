"""The app, as Celery's documentation for Django shows it."""

from celery import Celery

app = Celery("celery_project")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["celery_project"])


@app.task(bind=True, ignore_result=True)
def debug_task(self):
    print(f"Request: {self.request!r}")
