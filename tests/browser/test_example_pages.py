"""The pages of the example project by the rules of axe, in light and dark."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request

import pytest
from django.conf import settings
from django.db import connection

from ..conftest import until
from ..ports import free_port
from .test_accessibility import violations

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(connection.vendor != "sqlite", reason="One run is enough."),
]
PAGES = ["/", "/?q=path", "/?q=nothing-has-this-name", "/trouble/"]
# A library of one file, indexed. The server shows the lines of the real one, which are the same.
FILL = """
import os, posixpath, shutil
from pathlib import Path
from django.contrib.auth.models import User
from django_dbqueue.testing import drain
from example_project import library
from example_project.tasks import scan
User.objects.create_superuser("ann", password="ann's own")
library.ROOT = Path(os.environ["FILES"])
shutil.copy(posixpath.__file__, library.ROOT)
scan.call()
drain()
"""


@pytest.fixture
def example(tmp_path):
    """Serve the example project, with an index, and return its address."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "DATABASE_URL": f"sqlite:///{tmp_path}/example.sqlite3",
        "FILES": str(tmp_path / "files"),
    }

    (tmp_path / "files").mkdir()

    def manage(*arguments: str) -> list[str]:
        return [sys.executable, "manage.py", *arguments]

    for arguments in (["migrate", "-v0"], ["shell", "-v0", "-c", FILL]):
        subprocess.run(manage(*arguments), cwd=settings.BASE_DIR, env=env, check=True)
    address = f"127.0.0.1:{free_port()}"
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            manage("runserver", "--noreload", address),
            cwd=settings.BASE_DIR,
            env=env,
            stdout=log,
            stderr=log,
        )
        try:
            until(lambda: answers(f"http://{address}/"))
            yield f"http://{address}"
        finally:
            server.terminate()
            server.wait()


def answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except OSError:
        return False


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_on_the_pages_of_the_example(example, chromium, theme):
    chromium.get(f"{example}/admin/login/?next=/")
    chromium.find_element("name", "username").send_keys("ann")
    chromium.find_element("name", "password").send_keys("ann's own")
    chromium.find_element("css selector", "[type=submit]").click()
    preferred = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", preferred)
    try:
        found = {}
        for page in PAGES:
            chromium.get(example + page)
            if problems := violations(chromium):
                found[page] = problems
    finally:
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

    assert found == {}
    chromium.get(f"{example}/?q=path")
    assert "posixpath" in chromium.find_element("tag name", "main").text
