"""What the jobs store: the modules of the standard library, and what is defined in them."""

from __future__ import annotations

from collections.abc import Iterable

from django.db import models, transaction
from django.db.models import Case, Q, Value, When
from django.db.models.functions import Length

from .parsing import Found


class ModuleQuerySet(models.QuerySet["Module"]):
    def store(self, path: str, name: str, lines: int, found: Iterable[Found]) -> int:
        """Replace what is known of a module, all or nothing. Returns how many definitions it has now."""
        with transaction.atomic(using=self.db):
            module, new = self.update_or_create(path=path, defaults={"name": name, "lines": lines})
            definitions = Definition.objects.using(self.db)
            if not new:
                definitions.filter(module=module).delete()
            return len(definitions.bulk_create(Definition(module=module, **vars(each)) for each in found))


class Module(models.Model):
    """One file of the standard library that was parsed."""

    path = models.CharField(max_length=255, unique=True, help_text="From the library's root, with slashes.")
    name = models.CharField(max_length=255)
    lines = models.PositiveIntegerField()
    indexed_at = models.DateTimeField(auto_now=True)

    objects = ModuleQuerySet.as_manager()

    def __str__(self) -> str:
        return self.name


class DefinitionQuerySet(models.QuerySet["Definition"]):
    def matching(self, query: str) -> DefinitionQuerySet:
        """Those that have every word of the query in their name or docstring, the best first."""
        has_all = Q()
        for word in query.split():
            has_all &= Q(qualified_name__icontains=word) | Q(docstring__icontains=word)
        rank = Case(
            When(Q(qualified_name__iexact=query) | Q(name__iexact=query), then=Value(0)),
            When(name__istartswith=query, then=Value(1)),
            When(name__icontains=query, then=Value(2)),
            When(qualified_name__icontains=query, then=Value(3)),
            default=Value(4),
        )
        is_test = Case(When(module__path__startswith="test/", then=Value(1)), default=Value(0))
        return self.filter(has_all).order_by(rank, is_test, Length("qualified_name"), "qualified_name", "pk")


class Definition(models.Model):
    """A module, a class or a function, and where it is."""

    class Kind(models.TextChoices):
        MODULE = "module"
        CLASS = "class"
        FUNCTION = "function"
        COROUTINE = "coroutine"

    module = models.ForeignKey(Module, on_delete=models.CASCADE, related_name="definitions")
    kind = models.CharField(max_length=10, choices=Kind.choices)
    name = models.TextField()
    qualified_name = models.TextField()
    line = models.PositiveIntegerField()
    docstring = models.TextField(blank=True)

    objects = DefinitionQuerySet.as_manager()

    def __str__(self) -> str:
        return self.qualified_name
