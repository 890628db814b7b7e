"""Sphinx: ``sphinx-build -W -b html docs build/docs``."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

project = "django-dbqueue-tasks"
author = "the django-dbqueue-tasks contributors"
copyright = "the django-dbqueue-tasks contributors"
release = version = re.search(
    r'__version__ = "(.+)"', (ROOT / "django_dbqueue" / "__init__.py").read_text()
)[1]

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"django-dbqueue-tasks {release}"
exclude_patterns = ["build"]
