"""Sphinx: ``sphinx-build -W -b html docs build/docs``."""

import os
import re
from pathlib import Path

import django
from django.conf import settings

ROOT = Path(__file__).resolve().parent.parent

# The API reference is made from docstrings, so the package is imported. Nothing connects to the
# database.
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=["django_dbqueue"],
    TASKS={"default": {"BACKEND": "django_dbqueue.backend.DatabaseBackend"}},
)
django.setup()

from django.db.models import Model  # noqa: E402

import django_dbqueue  # noqa: E402
from django_dbqueue.contrib import tasks  # noqa: E402

# The ready-made tasks are documented as the functions that they call.
tasks.call_command, tasks.run_sql = tasks.call_command.func, tasks.run_sql.func

project = "django-dbqueue-tasks"
author = "the django-dbqueue-tasks contributors"
copyright = "the django-dbqueue-tasks contributors"
release = version = django_dbqueue.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 88
autosummary_generate = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
# Read the Docs builds each tag, and calls main "latest". The version in main is still that of the
# last release.
is_next = os.environ.get("READTHEDOCS_VERSION") == "latest"
html_title = f"django-dbqueue-tasks {'(next release)' if is_next else release}"
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")
exclude_patterns = ["build"]

PARAMETER = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*): (.+)")


def describe_fields(_app, _what, _name, described, _options, lines):
    """Name the columns of a model."""
    if isinstance(described, type) and issubclass(described, Model):
        names = ", ".join(f"``{field.name}``" for field in described._meta.fields)
        lines += [f"Fields: {names}.", ""]


def describe_parameters(_app, _what, _name, _described, _options, lines):
    """Turn the paragraphs ``name: text`` of a docstring into a definition list."""
    found, is_list, before = [], False, ""
    for line in lines:
        parameter = PARAMETER.fullmatch(line) if is_list or not before else None
        is_list = bool(parameter) or (is_list and line.startswith(" "))
        if parameter:
            names = [f"``{name}``" for name in parameter[1].split(", ")]
            found += [", ".join(names), f"    {parameter[2]}"]
        else:
            found.append(line)
        before = line
    lines[:] = found


def setup(app):
    app.connect("autodoc-process-docstring", describe_parameters)
    app.connect("autodoc-process-docstring", describe_fields)
