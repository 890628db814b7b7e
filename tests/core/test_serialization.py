"""What a job may carry comes back as it went in, on every database, or is refused at the caller's line."""

from __future__ import annotations

import enum
from decimal import Decimal

import pytest

from django_dbqueue import testing

from .. import tasks

pytestmark = pytest.mark.django_db


class Colour(str, enum.Enum):
    RED = "red"


def nested(depth, around=0):
    for _ in range(depth):
        around = [around]
    return around


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**63),
        2**63,
        10**40,
        0.1,
        1e-300,
        "",
        "ä ß € 漢字 🎉 \u2028 \\ \" ' \t\n\r \x7f",
        "ends with a backslash\\",
        [],
        {},
        {"": [None, {"nested": [[[]]]}]},
        "x" * 10_000_000,
        list(range(100_000)),
        nested(30),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_value_comes_back_whole(value):
    result = tasks.echo.enqueue(value)
    testing.drain()

    result.refresh()
    assert result.return_value == value
    assert tasks.echo.get_result(result.id).args == [value]


@pytest.mark.parametrize(
    ("value", "becomes"),
    [((1, (2,)), [1, [2]]), (b"text", "text"), (Colour.RED, "red"), (range(3), [0, 1, 2])],
)
def test_what_is_near_to_json_becomes_json(value, becomes):
    result = tasks.echo.enqueue(value)

    assert tasks.echo.get_result(result.id).args == [becomes]


@pytest.mark.parametrize("wrapped", [[], {"a": 1}])
def test_what_is_nested_too_deep_for_one_database_is_refused_by_all(wrapped):
    with pytest.raises(ValueError, match="Nested more than 30 deep, which MariaDB cannot store"):
        tasks.echo.enqueue(nested(30, around=wrapped))


def circular():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (object(), TypeError, "argument 'value': Unsupported type: <class 'object'>"),
        (Decimal(1), TypeError, "Unsupported type: <class 'decimal.Decimal'>"),
        ({1, 2}, TypeError, "Unsupported type: <class 'set'>"),
        ({1: "a"}, TypeError, "as the key 1; JSON's keys are text. Pass str"),
        (float("nan"), ValueError, "nan is not JSON"),
        ([float("-inf")], ValueError, "-inf is not JSON"),
        ("a\x00b", ValueError, "NUL character"),
        ({"\x00": 1}, ValueError, "NUL character"),
        ("\ud800", ValueError, "lone surrogate"),
        (b"\xff", ValueError, "not UTF-8"),
        (10**5000, ValueError, "over 4,000 digits"),
        (circular(), ValueError, "Nested more than 30 deep"),
    ],
    ids=[str(number) for number in range(12)],
)
def test_what_is_not_json_is_refused_with_the_arguments_name(value, error, message):
    with pytest.raises(error, match=message) as caught:
        tasks.echo.enqueue(value=value)

    assert "tests.tasks.echo()" in str(caught.value)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing a required argument: 'a'"),
        ((1, 2, 3), {}, "too many positional arguments"),
        ((1,), {"c": 3}, "got an unexpected keyword argument 'c'"),
        ((1,), {"a": 3}, "multiple values for argument 'a'"),
    ],
)
def test_a_wrong_call_is_refused_at_the_callers_line(args, kwargs, message):
    with pytest.raises(TypeError, match=message):
        tasks.add.enqueue(*args, **kwargs)


def test_the_context_is_not_the_callers_to_give():
    with pytest.raises(TypeError, match="too many positional arguments"):
        tasks.record.enqueue("a context")
