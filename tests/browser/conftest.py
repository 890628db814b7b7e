"""The system's headless Chromium.

``DBQUEUE_BROWSER``, which CI sets, requires it. Otherwise tests are skipped if it is not installed.
"""

from __future__ import annotations

import os
import shutil

import pytest

REQUIRED = bool(os.environ.get("DBQUEUE_BROWSER"))


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    if not REQUIRED and not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("Chromium or chromedriver is not installed.")
    if not REQUIRED:
        pytest.importorskip("selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    profile = tmp_path_factory.mktemp("profile")
    quiet = [
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
    ]
    for argument in [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        *quiet,
        f"--user-data-dir={profile}",
        "--window-size=1400,1000",
    ]:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield browser
    browser.quit()
