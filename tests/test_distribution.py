"""What is built for the package index.

``DBQUEUE_DIST`` names a folder with what was built, such as that of a release.
"""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from django.core.management import call_command
from django.db import connection

import django_dbqueue

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheel and of the source distribution."""
    if given := os.environ.get("DBQUEUE_DIST"):
        return ROOT / given
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_wheel_has_the_package_alone(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()

    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"django_dbqueue"}
    assert not [name for name in names if name.endswith((".po", ".pyc")) or "/test_" in name]
    for needed in (
        "django_dbqueue/py.typed",
        "django_dbqueue/locale/de/LC_MESSAGES/django.mo",
        "django_dbqueue/management/commands/queue.py",
        "django_dbqueue/migrations/0001_initial.py",
    ):
        assert needed in names
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "django_dbqueue").rglob("*")
        if path.is_file() and path.suffix not in (".po", ".pyc")
    }
    assert package <= set(names)


def test_it_needs_nothing_but_django_and_croniter(wheel: zipfile.ZipFile) -> None:
    """The backport of Django's Tasks framework is for Pythons without Django 6.0."""
    needed = [
        each for each in metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in each
    ]

    assert {re.split(r"[<>=;]", each)[0].strip() for each in needed} == {
        "django",
        "croniter",
        "django-tasks",
    }
    (backport,) = (each for each in needed if each.startswith("django-tasks"))
    assert "python_version < '3.12'" in backport


ALONE = """
import sys

NEEDED = {"asgiref", "croniter", "dateutil", "django", "django_dbqueue", "django_stubs_ext", "django_tasks", "pytz", "six",
          "sqlparse", "typing_extensions", "tzdata", "mysite", "manage", "usercustomize"}


class Nothing:
    def find_spec(self, name, path=None, target=None):
        name = name.partition(".")[0]
        if name not in NEEDED | sys.stdlib_module_names and not name.startswith("_"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Nothing())
"""
SETTINGS = """
INSTALLED_APPS += ["django_dbqueue", "mysite"]
TASKS = {"default": {"BACKEND": "django_dbqueue.backend.DatabaseBackend"}}
DATABASES["default"]["OPTIONS"] = {
    "timeout": 60, "transaction_mode": "IMMEDIATE", "init_command": "PRAGMA journal_mode=WAL",
}
"""
TASK = """
from django_dbqueue import task


@task
def add(a, b):
    return a + b
"""


@pytest.mark.skipif(connection.vendor != "sqlite", reason="It has its own SQLite database.")
def test_wheel_runs_jobs_with_nothing_but_what_it_needs(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """None of the optional packages can be imported."""
    wheel.extractall(tmp_path / "installed")
    (tmp_path / "installed/sitecustomize.py").write_text(ALONE)
    project = tmp_path / "project"
    project.mkdir()
    call_command("startproject", "mysite", str(project))
    with (project / "mysite/settings.py").open("a") as settings:
        settings.write(SETTINGS)
    (project / "mysite/tasks.py").write_text(TASK)
    own = {"PYTHONPATH": str(tmp_path / "installed"), "DJANGO_SETTINGS_MODULE": "mysite.settings"}

    def manage(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=project,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(tmp_path) in manage(
        "shell", "-v", "0", "-c", "import django_dbqueue; print(django_dbqueue.__file__)"
    )
    manage("migrate", "-v", "0")
    manage("check", "--fail-level", "WARNING")
    manage("queue", "enqueue", "mysite.tasks.add", "--args", "[1, 2]")
    manage("runqueue", "--drain")
    (job,) = json.loads(manage("queue", "jobs", "--json"))

    assert (job["task"], job["state"]) == ("mysite.tasks.add", "successful")


def test_metadata(wheel: zipfile.ZipFile) -> None:
    found = metadata(wheel)

    assert found["Name"] == "django-dbqueue-tasks"
    assert found["Version"] == django_dbqueue.__version__
    assert (found["License-Expression"], found["License-File"]) == ("BSD-3-Clause", "LICENSE")
    # The page of the index has no files beside it.
    text = str(found.get_payload())
    assert text.startswith("# ")
    assert not re.findall(r"\]\((?!https?:)", text)


def test_source_distribution_has_the_metadata_of_the_wheel(
    built: Path, wheel: zipfile.ZipFile
) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        (name,) = (each for each in archive.getnames() if each.endswith("/PKG-INFO"))
        file = archive.extractfile(name)
        assert file
        found = email.message_from_bytes(file.read())

    assert found.items() == metadata(wheel).items()


def test_release_publishes_what_was_checked_and_attested() -> None:
    path = ROOT / ".github" / "workflows" / "release.yml"
    if not path.exists():
        pytest.skip("The source distribution has no workflows.")
    text = path.read_text()
    jobs = yaml.safe_load(text)["jobs"]
    steps = [each.get("run") or each["uses"] for each in jobs["build"]["steps"]]

    build, twine, check, attest, upload = (
        next(number for number, step in enumerate(steps) if part in step)
        for part in (
            "python -m build",
            "twine check --strict",
            "tests/test_distribution.py",
            "attest-build-provenance",
            "upload-artifact",
        )
    )
    assert build <= twine < check < attest < upload
    assert jobs["publish"]["needs"] == "build"
    # Trusted publishing: the job has an identity, and no password.
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in text.replace("no password", "") and "secrets." not in text


def test_source_distribution_can_be_tested(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    for needed in ("LICENSE", "README.md", "Makefile", "manage.py", "tests/conftest.py"):
        assert needed in names
    assert not [name for name in names if name.startswith((".ci", ".github", "benchmarks"))]
    assert not [name for name in names if "conformance/source" in name]
