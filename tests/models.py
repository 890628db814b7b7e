from django.db import models

from django_dbqueue.models.expressions import Now


class Run(models.Model):
    """One row for each time that a task ran: its uniqueness shows that no job ran twice."""

    job = models.CharField(max_length=64, unique=True)


class Effect(models.Model):
    """What an attempt has done to the world, whatever becomes of the attempt."""

    job = models.CharField(max_length=64, db_index=True)
    attempt = models.PositiveIntegerField()


class Interval(models.Model):
    """From when until when an attempt ran, by the database's time; without an end, if it was killed."""

    key = models.CharField(max_length=64)
    job = models.CharField(max_length=64)
    attempt = models.PositiveIntegerField(null=True)
    began_at = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)


class Mark(models.Model):
    """What an attempt, by its number in the row, was about: the version of a key, or the stage of a pipeline."""

    job = models.CharField(max_length=64, db_index=True)
    attempt = models.PositiveIntegerField()
    value = models.PositiveIntegerField()
