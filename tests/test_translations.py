"""The translations are complete, fit the texts of the code, and are compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from babel.messages.catalog import Catalog
from babel.messages.extract import extract, extract_from_file
from babel.messages.mofile import read_mo
from babel.messages.pofile import read_po
from django.test import Client
from django.utils import translation
from django.utils.translation.template import templatize

import django_dbqueue
from django_dbqueue.models import Queue

from .admin.conftest import *  # noqa: F403
from .admin.test_permissions import PAGES, url

PACKAGE = Path(django_dbqueue.__file__).parent
LANGUAGES = ["ar", "de", "es", "fr", "ja", "pt_BR", "ru", "uk", "zh_Hans"]
KEYWORDS: dict[str, Any] = {
    **dict.fromkeys(("_", "gettext", "gettext_lazy", "gettext_noop")),
    **dict.fromkeys(("ngettext", "ngettext_lazy"), (1, 2)),
    "pgettext": ((1, "c"), 2),
}


@cache
def texts_of_the_code() -> frozenset[str]:
    """Return the texts that the code and the templates translate, each plural by its singular."""
    return frozenset(text for text in _extracted() if text)


def _extracted() -> Iterator[str]:
    found = [
        each
        for path in PACKAGE.rglob("*.py")
        if "migrations" not in path.parts
        for each in extract_from_file("python", path, KEYWORDS)
    ]
    for path in PACKAGE.rglob("*.html"):
        found += extract("python", BytesIO(templatize(path.read_text()).encode()), KEYWORDS)
    for _line, message, *_rest in found:
        yield message[0] if isinstance(message, tuple) else message


@cache
def catalog(language: str, kind: str = "po") -> Catalog:
    path = PACKAGE / "locale" / language / "LC_MESSAGES" / f"django.{kind}"
    with path.open("rb") as file:
        return read_po(file, locale=language) if kind == "po" else read_mo(file)


def translations(found: Catalog) -> dict[str, tuple[str, ...]]:
    return {
        _first(each.id): (each.string,) if isinstance(each.string, str) else tuple(each.string)
        for each in found
        if each.id
    }


def _first(text: str | tuple[str, ...] | list[str]) -> str:
    return text if isinstance(text, str) else text[0]


def test_each_language_has_a_test() -> None:
    assert sorted(path.name for path in (PACKAGE / "locale").iterdir()) == LANGUAGES


def test_the_code_has_texts() -> None:
    assert len(texts_of_the_code()) > 700
    # From a function, a label, a plural, a template, and a block of a template.
    for text in ("Retry in steps", "%(count)s hanged job.", "What they have in common"):
        assert text in texts_of_the_code()


@pytest.mark.parametrize("language", LANGUAGES)
class TestLanguage:
    def test_each_text_is_translated_and_no_other(self, language: str) -> None:
        texts = translations(catalog(language))

        # `make translations` adds what is missing.
        assert set(texts) == texts_of_the_code()
        assert [text for text, found in texts.items() if not all(found)] == []
        assert [each.id for each in catalog(language) if each.id and each.fuzzy] == []

    def test_placeholders_are_those_of_the_text(self, language: str) -> None:
        wrong = {each.id: list(each.check(catalog(language))) for each in catalog(language)}
        braces = re.compile(r"\{\w*\}|</?\w+>")

        assert {text: errors for text, errors in wrong.items() if errors} == {}
        for text, found in translations(catalog(language)).items():
            for each in found:
                assert sorted(braces.findall(each)) == sorted(braces.findall(text)), text
                assert each.strip() == each or text.strip() != text, each

    def test_it_is_compiled(self, language: str) -> None:
        # Otherwise: `make translations`.
        assert translations(catalog(language, "mo")) == translations(catalog(language))

    def test_each_page_is_shown_in_it(
        self, rows_by_page: dict[str, Any], superuser: Client, language: str
    ) -> None:
        title = translations(catalog(language))["job"][0]
        code = translation.to_language(language)
        with translation.override(code):
            for page in PAGES:
                assert superuser.get(url(page)).status_code == 200
                if page != "hangedjob":
                    address = url(page, "change", rows_by_page[page].pk)
                    assert superuser.get(address).status_code == 200, page
            for page in ("overview", "databasehealth"):
                assert superuser.get(url(page)).status_code == 200
            shown = superuser.get(url("job", "change", rows_by_page["job"].pk)).text

        assert f'lang="{code}"' in shown and title.casefold() in shown.casefold()
        assert ('dir="rtl"' in shown) == (language == "ar")

    def test_queue_is_paused_for_a_while(self, superuser: Client, language: str) -> None:
        # Drivers may write a duration as the text that it has on the page.
        Queue.objects.create(name="mail")
        with translation.override(translation.to_language(language)):
            answer = superuser.post(
                url("queue", "pause_for", "mail"), {"value": "900", "confirmed": "yes"}
            )

        assert answer.status_code == 302
        assert Queue.objects.paused().exists()
