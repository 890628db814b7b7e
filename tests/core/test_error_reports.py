"""Fingerprints of errors: similar failures share a group."""

from __future__ import annotations

import json
from dataclasses import astuple, replace

import pytest

from django_dbqueue.core.error_reports import clean, report, traceback_of


def raised(call):
    try:
        call()
    except Exception as error:
        return report(error, error.__traceback__.tb_next)


def throw(kind):
    raise kind("x")


def fail(message):
    raise ValueError(message)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("order 17 is gone", "order 99812 is gone"),
        ("no such file: '/tmp/a'", "no such file: '/srv/x/y'"),
        ("at 12:30:01.5", "at 9:05:59.125"),
        ("job 01a1fde5-c590-7c51-99fc-5d61776db55a", "job 7f571f61-17f0-4a3b-8c9d-000000000001"),
        ("<object at 0x7f571f6117f0>", "<object at 0x10>"),
        ("token deadbeefcafe1234 expired", "token 0123456789abcdef expired"),
    ],
)
def test_fingerprint_ignores_numbers_ids_and_quoted_text(one, other):
    assert raised(lambda: fail(one)).fingerprint == raised(lambda: fail(other)).fingerprint


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: fail("connection refused"), lambda: fail("connection reset")),
        (lambda: fail("x"), lambda: [].pop()),
        (lambda: json.loads("{"), lambda: fail("x")),
    ],
)
def test_different_failures_have_different_fingerprints(one, other):
    assert raised(one).fingerprint != raised(other).fingerprint


def test_location_is_top_frame_of_project_code():
    def parse():
        json.loads("{")

    assert raised(parse).location == "core/test_error_reports.py:parse"


class Meta(type):
    def __getattribute__(cls, name):
        if name in ("__module__", "__qualname__"):
            raise RuntimeError(name)
        return super().__getattribute__(name)


class OfMeta(Exception, metaclass=Meta):
    pass


class Unreadable(BaseException):
    def __getattribute__(self, name):
        raise RuntimeError(name)


def fail_in(filename):
    exec(compile("raise ValueError", filename, "exec"))


@pytest.mark.parametrize(
    ("call", "type_"),
    [
        (
            lambda: throw(type("Odd", (Exception,), {"__module__": "a\x00\udcff"})),
            "a\ufffd\\udcff.Odd",
        ),
        (lambda: throw(type("Odd", (Exception,), {"__module__": None})), "None.Odd"),
        (lambda: throw(OfMeta), f"{__name__}.OfMeta"),
        (lambda: throw(Unreadable), f"{__name__}.Unreadable"),
        (lambda: fail_in("/srv/\udcff.py"), "builtins.ValueError"),
        (lambda: fail_in("/srv/" + "é" * 300), "builtins.ValueError"),
    ],
)
def test_report_of_any_exception_can_be_stored(call, type_):
    try:
        call()
    except BaseException as error:
        raised = error
    # Outside of the block: pytest cannot show an error whose context is one of these.
    found = report(raised, traceback_of(raised))

    assert found.type == type_
    assert len(found.fingerprint) == 32
    for version in (found, found.in_ascii()):
        assert [clean(text) for text in astuple(version)] == list(astuple(version))
        assert len(version.location) <= 255
    assert all(text.isascii() for text in astuple(found.in_ascii()))


def test_ascii_contains_no_nul():
    found = replace(raised(lambda: fail("x")), message="a\x00é", type="b\x00")

    assert found.in_ascii().message == "a\\ufffd\\xe9"
    assert found.in_ascii().type == "b\\ufffd"


# The code holds the fixed words of a message, around the values formatted into it.


def by_name(name):
    raise ValueError(f"customer {name} has no address")


def by_percent(name):
    raise ValueError("customer %s has no address" % name)  # noqa: UP031


def by_format(name):
    raise ValueError("customer {} has no address".format(name))  # noqa: UP032


def by_word(word):
    raise LookupError(f"no such thing: {word}")


@pytest.mark.parametrize(
    ("raising", "one", "other"),
    [
        (by_name, "Ada Lovelace", "Bob"),
        (by_percent, "ada", "bob marley"),
        (by_format, "ada", "bob marley"),
        (by_word, "abc123def", "teapot"),
        (by_word, "ada@example.com", "bob.b+x@mail.example.org"),
        (by_word, "/srv/data/a b.csv", "/tmp/x.txt"),
        (by_word, "https://example.com/a?b=c", "http://localhost/"),
    ],
)
def test_fingerprint_ignores_values_formatted_by_code(raising, one, other):
    assert raised(lambda: raising(one)).fingerprint == raised(lambda: raising(other)).fingerprint


class FromElsewhere(Exception):
    """An error whose words are in no Python code, such as a server's."""


def from_elsewhere(*words):
    raise FromElsewhere(" ".join(words))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("customer abc123def is gone", "customer x9 is gone"),
        ("no mailbox ada@example.com here", "no mailbox bob.b+x@mail.example.org here"),
        ("cannot open /srv/data/a.csv now", "cannot open /tmp/x.txt now"),
        ("cannot open C:\\data\\a.csv now", "cannot open D:\\x.txt now"),
        ("404 for https://example.com/a?b=c", "404 for http://localhost/"),
    ],
)
def test_fingerprint_ignores_addresses_paths_and_ids(one, other):
    assert (
        raised(lambda: from_elsewhere(*one.split())).fingerprint
        == raised(lambda: from_elsewhere(*other.split())).fingerprint
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            lambda: from_elsewhere("connection", "refused"),
            lambda: from_elsewhere("connection", "reset"),
        ),
        (lambda: from_elsewhere("and/or"), lambda: from_elsewhere("read/write")),
        (lambda: by_name("a"), lambda: by_percent("a")),
        (lambda: fail("customer a has no address"), lambda: fail("customer a has no mail")),
        (lambda: fail(f"customer {1} has no address"), lambda: fail(f"customer {1} has no mail")),
    ],
)
def test_fingerprint_differs_by_words_and_location(one, other):
    assert raised(one).fingerprint != raised(other).fingerprint
