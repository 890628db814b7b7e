"""Arguments and results keep their values on every database, or ``enqueue()`` refuses them."""

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
def test_value_survives_round_trip(value):
    result = tasks.echo.enqueue(value)
    testing.drain()

    result.refresh()
    assert result.return_value == value
    assert tasks.echo.get_result(result.id).args == [value]


@pytest.mark.parametrize(
    ("value", "becomes"),
    [((1, (2,)), [1, [2]]), (b"text", "text"), (Colour.RED, "red"), (range(3), [0, 1, 2])],
)
def test_json_compatible_value_becomes_json(value, becomes):
    result = tasks.echo.enqueue(value)

    assert tasks.echo.get_result(result.id).args == [becomes]


@pytest.mark.parametrize("wrapped", [[], {"a": 1}])
def test_deep_nesting_is_refused_on_every_database(wrapped):
    with pytest.raises(
        ValueError, match="Nested more than 30 levels deep, which MariaDB cannot store"
    ):
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
        (10**302, ValueError, "over 300 digits"),
        (circular(), ValueError, "Nested more than 30 levels deep"),
    ],
    ids=[str(number) for number in range(12)],
)
def test_non_json_value_is_refused_with_argument_name(value, error, message):
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
def test_wrong_arguments_are_refused_by_enqueue(args, kwargs, message):
    with pytest.raises(TypeError, match=message):
        tasks.add.enqueue(*args, **kwargs)


def test_caller_cannot_pass_the_context():
    with pytest.raises(TypeError, match="too many positional arguments"):
        tasks.record.enqueue("a context")
