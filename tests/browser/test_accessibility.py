"""Each page by the rules of axe, in light and dark, from right to left, and on a phone."""

from __future__ import annotations

import pytest
from django.db import connection

from .conftest import REQUIRED

if not REQUIRED:
    pytest.importorskip("axe_selenium_python")

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.browser,
    pytest.mark.skipif(
        connection.vendor != "sqlite",
        reason="Pages are the same on every database: one run is enough.",
    ),
]


def violations(browser) -> list[str]:
    """Return what axe finds on the page, each with the first element."""
    from axe_selenium_python import Axe

    axe = Axe(browser)
    axe.inject()
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in axe.run()["violations"]]


@pytest.mark.parametrize(
    ("theme", "language"), [("light", "en-us"), ("dark", "en-us"), ("light", "ar")]
)
def test_axe_finds_nothing_on_any_page(operator, pages, settings, theme, language):
    settings.LANGUAGE_CODE = language
    operator.browser.execute_script(f"localStorage.setItem('theme', '{theme}')")
    found = {}
    for address in pages:
        operator.open(address)
        html = operator.browser.find_element("tag name", "html")
        assert html.get_attribute("data-theme") == theme
        assert html.get_attribute("dir") == ("rtl" if language == "ar" else "ltr")
        if problems := violations(operator.browser):
            found[address] = problems

    assert found == {}
    assert operator.console_errors() == []


@pytest.mark.parametrize("language", ["en-us", "de", "ar"])
def test_no_page_is_wider_than_a_phone(operator, pages, settings, phone, language):
    settings.LANGUAGE_CODE = language
    wide = {}
    for address in pages:
        operator.open(address)
        width = operator.browser.execute_script("return document.documentElement.scrollWidth")
        if width > phone:
            wide[address] = width

    assert wide == {}
