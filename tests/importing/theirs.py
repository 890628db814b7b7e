"""The same tasks, as the other queue has them."""

from django.conf import settings


def send(user_id, template="welcome", tags=()):
    raise AssertionError("It is to run by the other queue.")


def gone():
    raise AssertionError("It is to run by the other queue.")


if settings.SOURCE == "procrastinate":
    from procrastinate.contrib.django import app

    send, gone = app.task(send), app.task(gone)
elif settings.SOURCE in settings.BACKENDS:
    from django.tasks import task

    send, gone = task(backend="old")(send), task(backend="old")(gone)
