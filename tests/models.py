from django.db import models


class Run(models.Model):
    """One row for each time that a task ran: its uniqueness shows that no job ran twice."""

    job = models.CharField(max_length=64, unique=True)


class Effect(models.Model):
    """What an attempt has done to the world, whatever becomes of the attempt."""

    job = models.CharField(max_length=64, db_index=True)
    attempt = models.PositiveIntegerField()
