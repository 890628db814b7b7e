from django.db import models

from django_dbqueue.models.expressions import Now


class Order(models.Model):
    email = models.EmailField()
    cents = models.PositiveIntegerField()
    invoice = models.CharField(max_length=20, blank=True)
    is_paid = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self):
        return f"Order {self.pk}"


class Run(models.Model):
    """One row for each run of a task: the unique constraint shows that no job ran twice."""

    job = models.CharField(max_length=64, unique=True)


class Effect(models.Model):
    """An effect of an attempt, whatever its outcome."""

    job = models.CharField(max_length=64, db_index=True)
    attempt = models.PositiveIntegerField()


class Interval(models.Model):
    """When an attempt ran, by the database's clock; without an end if it was killed."""

    key = models.CharField(max_length=64)
    job = models.CharField(max_length=64)
    attempt = models.PositiveIntegerField(null=True)
    began_at = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)


class Mark(models.Model):
    """The version of a key, or the stage of a pipeline, that an attempt ran."""

    job = models.CharField(max_length=64, db_index=True)
    attempt = models.PositiveIntegerField()
    value = models.PositiveIntegerField()
