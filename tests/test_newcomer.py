"""Follow the README, the quickstart and the tutorial: a new project, real processes, SQLite.

The modules of a page are complete before its other blocks are run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import django
import pytest
from django.core.management import call_command
from django.db import connection

from .conftest import LONG
from .test_docs import DOCS, FAILS, QUICKSTART, ROOT, Block, blocks, is_settings, name_of

# Run in the project's shell, which waits for runqueue to run the enqueued jobs.
SHELL = """
import doctest, json, sys, time

from django_dbqueue.models import Job

typed, may_fail = {"__name__": "__main__"}, False
for place, language, text in json.load(sys.stdin):
    if language == "pycon":
        test = doctest.DocTestParser().get_doctest(text, typed, place, place, 0)
        test.globs = typed
        assert not doctest.DocTestRunner().run(test, clear_globs=False).failed
    else:
        exec(compile(text, place, "exec"), typed)
    end = time.monotonic() + 60
    while Job.objects.filter(state__in=["ready", "running", "blocked"]).exists():
        assert time.monotonic() < end, list(Job.objects.values_list("task", "state"))
        time.sleep(0.05)
    may_fail |= FAILS in text
    assert may_fail or not Job.objects.filter(state="failed").exists(), place
assert not Job.objects.filter(state="failed").exists()
"""


@pytest.mark.skipif(connection.vendor != "sqlite", reason="It has its own SQLite database.")
@pytest.mark.parametrize(
    "page", [ROOT / "README.md", QUICKSTART, DOCS / "tutorial.md"], ids=name_of
)
def test_new_project_runs_its_first_jobs_by_the_page(page: Path, tmp_path: Path):
    env = {
        name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"
    } | {"PYTHONPATH": str(ROOT)}

    def run(*arguments: str, text: str | None = None) -> None:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=env,
            input=text,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    call_command("startproject", "mysite", str(tmp_path))
    (tmp_path / "shop").mkdir()
    call_command("startapp", "shop", str(tmp_path / "shop"))
    with (tmp_path / "mysite/settings.py").open("a") as settings:
        settings.write('INSTALLED_APPS += ["shop"]\n')
        # On a busy machine a writer may wait longer than SQLite's default of five seconds.
        settings.write(f'DATABASES["default"]["OPTIONS"] = {{"timeout": {LONG}}}\n')
        if django.VERSION < (6, 1):
            settings.write('EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"\n')
        settings.writelines(block.text for block in blocks(page) if is_settings(block))
    for block in blocks(page):
        if path := file_of(block):
            with (tmp_path / path).open("a") as module:
                module.write(block.text)
    run("manage.py", "makemigrations", "shop")
    run("manage.py", "migrate")

    typed = [
        (block.place, block.language, block.text)
        for block in blocks(page)
        if block.language in ("python", "pycon") and not is_settings(block) and not file_of(block)
    ]
    with (tmp_path / "log").open("w") as log:
        runqueue = subprocess.Popen(
            [sys.executable, "manage.py", "runqueue"], cwd=tmp_path, env=env, stdout=log, stderr=log
        )
    try:
        run("manage.py", "shell", "-c", f"FAILS = {FAILS!r}\n{SHELL}", text=json.dumps(typed))
    finally:
        runqueue.terminate()
        assert runqueue.wait(LONG) == 0, (tmp_path / "log").read_text()
    run("manage.py", "test", "shop")


def file_of(block: Block) -> str:
    """Return the path of the module that the block belongs to; "" if it is typed in the shell."""
    found = re.match(r"# (shop/\w+\.py)\n", block.text)
    return found[1] if found and block.language == "python" else ""
