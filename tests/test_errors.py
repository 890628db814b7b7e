"""Fingerprints: what fails alike is one group."""

from __future__ import annotations

import json

import pytest

from django_dbqueue.errors import report


def raised(call):
    try:
        call()
    except Exception as error:
        return report(error, error.__traceback__.tb_next)


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
def test_numbers_ids_and_quoted_text_do_not_tell_failures_apart(one, other):
    assert raised(lambda: fail(one)).fingerprint == raised(lambda: fail(other)).fingerprint


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: fail("connection refused"), lambda: fail("connection reset")),
        (lambda: fail("x"), lambda: [].pop()),
        (lambda: json.loads("{"), lambda: fail("x")),
    ],
)
def test_different_failures_are_told_apart(one, other):
    assert raised(one).fingerprint != raised(other).fingerprint


def test_the_place_is_the_top_frame_of_the_projects_own_code():
    def parse():
        json.loads("{")

    assert raised(parse).location == "tests/test_errors.py:parse"
