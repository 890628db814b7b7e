"""What the example project does, on its own settings. ``test_example.py`` runs it."""

from __future__ import annotations

import os

import pytest
from django.db import connection

from django_dbqueue.models import Execution, Failure, Job
from django_dbqueue.testing import drain
from example_project import library
from example_project.models import Definition, Module, Scan
from example_project.tasks import index_file, parse, scan

from . import direct

pytestmark = pytest.mark.django_db


class Library:
    """A folder that stands in for the standard library. Each change is a second later than the one before."""

    def __init__(self, root) -> None:
        self._root, self._time = root, 4_000_000_000

    def write(self, path: str, text: str) -> None:
        (self._root / path).write_text(text)
        self.touch(path)

    def touch(self, path: str) -> None:
        self._time += 1
        os.utime(self._root / path, (self._time, self._time))


@pytest.fixture
def files(tmp_path, monkeypatch) -> Library:
    monkeypatch.setattr(library, "ROOT", tmp_path)
    return Library(tmp_path)


def names() -> set[str]:
    return set(Definition.objects.values_list("qualified_name", flat=True))


def test_what_is_new_is_indexed_and_summed_up(files):
    files.write("cat.py", "class Cat:\n    def purr(self): pass\n")
    files.write("dog.py", "def bark(): pass\n")
    files.write("tree.py", "the bark of a tree\n")

    assert scan.call() == 3
    drain()

    assert names() == {"cat", "cat.Cat", "cat.Cat.purr", "dog", "dog.bark"}
    summary = Scan.objects.finished().get()
    assert (summary.files, summary.indexed, summary.failed) == (3, 2, 1)
    assert not Module.objects.filter(parsed__isnull=False).exists()
    (failed,) = Execution.objects.filter(outcome="failed")
    assert (failed.job.task, failed.attempt) == (parse.module_path, 2)


def test_what_has_not_changed_is_not_indexed_again(files):
    files.write("cat.py", "")
    files.write("tree.py", "the bark of a tree\n")
    scan.call()
    drain()

    assert scan.call() == 0
    drain()

    assert Scan.objects.count() == 1
    assert set(Job.objects.filter(queue="index").values_list("attempt", flat=True)) == {2, 3}


@pytest.mark.parametrize("indexed_before", [True, False])
def test_what_has_changed_is_indexed_once_by_the_same_job(files, indexed_before):
    files.write("cat.py", "def purr(): pass\n")
    scan.call()
    if indexed_before:
        drain()
    files.write("cat.py", "def mew(): pass\n")

    assert (scan.call(), scan.call()) == (1, 0)
    drain()

    assert names() == {"cat", "cat.mew"}
    (job,) = Job.objects.filter(queue="index")
    assert (job.state, job.attempt) == ("successful", 6 if indexed_before else 3)
    assert Scan.objects.finished().first().indexed == 1


def test_a_stale_call_does_nothing(files):
    files.write("cat.py", "")
    scan.call()

    assert index_file.enqueue("cat.py", 1).enqueued == "ignored"


def test_a_file_that_was_only_touched_is_not_parsed_again(files):
    files.write("cat.py", "")
    scan.call()
    drain()
    files.touch("cat.py")

    assert scan.call() == 1
    drain()

    (job,) = Job.objects.filter(queue="index")
    assert job.result == "as it was"
    assert job.executions.filter(stage=1).count() == 1


def test_no_more_than_two_files_are_parsed_at_a_time(process):
    parse.enqueue_many([(f"{number}.py",) for number in range(5)])

    (lane,) = Job.objects.lanes()

    assert len(direct.claim(lane, process, limit=5)) == 2


def test_an_attempt_after_the_last_word_was_lost_leaves_the_index_as_it_is(files):
    files.write("cat.py", "def purr(): pass\n")
    scan.call()
    drain()

    assert Module.objects.filter(path="cat.py").index() == 2


def test_the_page_shows_how_the_last_scan_went(files, client):
    assert "make demo" in client.get("/").text
    files.write("cat.py", "")
    files.write("tree.py", "the bark of a tree\n")
    scan.call()
    drain()

    page = client.get("/").text

    assert "<b>1</b> done" in page
    assert ": 1 indexed, 1 failed" in page


def test_trouble_is_made_and_answered(client, admin_client):
    assert client.get("/trouble/").status_code == 302
    page = admin_client.get("/trouble/").content.decode()
    assert "Fail 250 of 1,000 jobs" in page
    assert ("Kill a worker" in page) == (connection.vendor != "sqlite")
    assert admin_client.post("/trouble/", {"kind": "none"}).status_code == 400

    response = admin_client.post("/trouble/", {"kind": "fail"}, follow=True)
    assert response.status_code == 200
    assert Job.objects.filter(queue="trouble").count() == 1000
    # Some of them, so that no retry is due before the last one has run.
    kept = Job.objects.filter(queue="trouble").order_by("pk")[:40]
    Job.objects.exclude(pk__in=list(kept.values_list("pk", flat=True))).delete()
    drain()

    assert Failure.objects.get().count == 10
    page = admin_client.get(f"/admin/dbqueue/failure/{Failure.objects.get().pk}/change/")
    value = '<td>country</td><td><span dir="ltr">&quot;IT&quot;</span></td>'
    assert f"{value}<td>100 %</td><td>0 %</td>" in page.content.decode()
