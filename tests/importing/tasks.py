"""The tasks of this queue."""

from django_dbqueue import task

calls, notes = [], []


@task
def send(user_id, template="welcome", tags=()):
    calls.append((user_id, template, tags))


@task
def note(**values):
    notes.append(values)
