from django.db import models


class Account(models.Model):
    balance = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.pk}: {self.balance}"
