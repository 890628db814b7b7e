"""Tables of the jobs: the modules of the standard library, and their definitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.db import models, transaction
from django.db.models import Case, Q, Value, When
from django.db.models.functions import Length, Now
from django.template.defaultfilters import pluralize

from django_dbqueue.models import Job

from .library import module_name
from .parsing import Found


class ModuleQuerySet(models.QuerySet["Module"]):
    def take_changed(self, files: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Store files with their times of change. Returns those that are new or have changed."""
        known = {module.path: module for module in self.only("path", "changed")}
        new, newer = [], []
        for path, changed in files:
            if path not in known:
                new.append(Module(path=path, name=module_name(path), changed=changed))
            elif changed > known[path].changed:
                known[path].changed = changed
                newer.append(known[path])
        self.bulk_create(new, ignore_conflicts=True)
        self.bulk_update(newer, ["changed"], batch_size=500)
        return [(module.path, module.changed) for module in [*new, *newer]]

    def note(self, digest: str, found: Iterable[Found]) -> None:
        """Store parsed definitions until they are indexed."""
        self.update(parsed={"digest": digest, "definitions": [vars(each) for each in found]})

    def index(self) -> int:
        """Replace a module's definitions with the parsed ones, all or nothing.

        Returns their number.
        """
        with transaction.atomic(using=self.db):
            module = self.select_for_update().get()
            # Empty in the next attempt, if a worker died between this commit and the job's.
            if parsed := module.parsed:
                module.definitions.all().delete()
                Definition.objects.bulk_create(
                    Definition(module=module, **each) for each in parsed["definitions"]
                )
                self.update(parsed=None, digest=parsed["digest"], indexed_at=Now())
            return module.definitions.count()


class Module(models.Model):
    """One file of the standard library."""

    path = models.CharField(
        max_length=255, unique=True, help_text="From the library's root, with slashes."
    )
    name = models.CharField(max_length=255)
    changed = models.BigIntegerField(
        help_text="When the file changed, as the last scan saw it, in nanoseconds."
    )
    digest = models.CharField(max_length=64, blank=True, help_text="Of the source that is indexed.")
    indexed_at = models.DateTimeField(null=True)
    parsed = models.JSONField(null=True, help_text="What was found in it, until it is indexed.")

    objects = ModuleQuerySet.as_manager()

    def __str__(self) -> str:
        return self.name


class DefinitionQuerySet(models.QuerySet["Definition"]):
    def matching(self, query: str) -> DefinitionQuerySet:
        """Select definitions with all words in their name or docstring, the best matches first."""
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
        return self.filter(has_all).order_by(
            rank, is_test, Length("qualified_name"), "qualified_name", "pk"
        )


class Definition(models.Model):
    """A module, class or function, with its place."""

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


class ScanQuerySet(models.QuerySet["Scan"]):
    def under_way(self) -> ScanQuerySet:
        return self.filter(finished_at=None)

    def finished(self) -> ScanQuerySet:
        """Select the finished scans, the newest first."""
        return self.filter(finished_at__isnull=False).order_by("-finished_at", "-pk")

    def sum_up(self, jobs: Mapping[str, int]) -> int:
        """Store the results of a scan. jobs: the number of its jobs in each state."""
        return self.update(
            indexed=jobs.get(Job.State.SUCCESSFUL, 0),
            failed=jobs.get(Job.State.FAILED, 0),
            finished_at=Now(),
        )


class Scan(models.Model):
    """A scan of the library that found files to index, with its results."""

    batch = models.UUIDField(unique=True)
    files = models.PositiveIntegerField()
    indexed = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    started_at = models.DateTimeField(db_default=Now())
    finished_at = models.DateTimeField(null=True)

    objects = ScanQuerySet.as_manager()

    def __str__(self) -> str:
        """``1,726 files in 20.1 s: 1,722 indexed, 4 failed``."""
        files = f"{self.files:,} file{pluralize(self.files)}"
        if self.finished_at is None:
            return f"{files}, under way"
        seconds = (self.finished_at - self.started_at).total_seconds()
        return f"{files} in {seconds:.1f} s: {self.indexed:,} indexed, {self.failed:,} failed"
