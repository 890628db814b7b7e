"""Log levels and fields: a worker creates no record that every handler drops."""

from __future__ import annotations

import json
import logging
import sys
from uuid import UUID

import pytest
from django.test import override_settings
from django.utils.log import RequireDebugTrue

from django_dbqueue.log import JobFields, JsonFormatter
from django_dbqueue.runtime.logging_setup import skip_unheard_lines

from .. import tasks, timely
from ..conftest import LONG, log_of
from ..management.test_runqueue import MANY


@pytest.fixture
def logger():
    """A logger that does not propagate."""
    logger = logging.Logger("one")
    logger.propagate = False
    return logger


def handler(level: int = logging.NOTSET, *filters: logging.Filter) -> logging.Handler:
    made = logging.NullHandler(level)
    for each in filters:
        made.addFilter(each)
    return made


def info_is_enabled(logger: logging.Logger) -> bool:
    skip_unheard_lines(logger)
    assert logger.isEnabledFor(logging.WARNING)
    return logger.isEnabledFor(logging.INFO)


def test_info_is_disabled_without_handlers(logger):
    assert not info_is_enabled(logger)


@override_settings(DEBUG=False)
def test_info_is_disabled_by_default_settings_without_debug(logger):
    logger.addHandler(handler(logging.INFO, RequireDebugTrue()))
    logger.addHandler(handler(logging.ERROR))

    assert not info_is_enabled(logger)


@override_settings(DEBUG=True)
def test_info_is_enabled_by_default_settings_with_debug(logger):
    logger.addHandler(handler(logging.INFO, RequireDebugTrue()))

    assert info_is_enabled(logger)


def test_info_is_enabled_for_handler_of_parent_logger(logger):
    logger.propagate, logger.parent = True, logging.Logger("parent")
    logger.parent.propagate = False
    logger.parent.addHandler(handler(logging.INFO))

    assert info_is_enabled(logger)


def test_info_is_enabled_for_handler_with_unknown_filter(logger):
    logger.addHandler(handler(logging.INFO, logging.Filter("another")))

    assert info_is_enabled(logger)


def test_configured_level_is_kept(logger):
    logger.setLevel(logging.INFO)

    assert info_is_enabled(logger)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("task", ["talk", "talk_async"])
def test_log_record_of_task_has_job_fields(task, caplog, worker):
    caplog.handler.addFilter(JobFields())
    try:
        result = getattr(timely, task).enqueue("ada", 2)
        worker()
        result.wait(LONG)
        logging.getLogger("shop.orders").warning("outside")
    finally:
        caplog.handler.filters.clear()

    lines = [record for record in caplog.records if record.name == "shop.orders"]
    assert {record.job_id for record in lines[:-1]} == {result.id}
    assert {record.task for record in lines[:-1]} == {f"tests.timely.{task}"}
    assert lines[-1].job_id == ""


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("verbosity", ["0", "1", "2"])
def test_verbosity_selects_log_lines_of_runqueue(runqueue, verbosity):
    tasks.add.enqueue(1)

    child = runqueue("--drain", "-v", verbosity, *MANY)

    assert child.wait(LONG) == 0
    assert ("supervisor@" in log_of(child)) == (verbosity != "0")
    assert ("starts (attempt 1)" in log_of(child)) == (verbosity == "2")


def record(**values: object) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "shop", "levelname": "INFO", "created": 0.25, **values})


def test_line_is_a_json_object_with_the_fields_of_its_record():
    line = JsonFormatter().format(
        record(msg="%s of %d", args=("one\n", 2), job_id=UUID(int=7), attempt=1, queue="", to=[1])
    )

    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "INFO",
        "logger": "shop",
        "message": "one\n of 2",
        "job_id": str(UUID(int=7)),
        "attempt": 1,
        "to": [1],
    }


class Odd:
    """A value like those of numpy, which also has no text."""

    def __str__(self) -> str:
        raise RuntimeError

    __bool__ = __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


HOLDS_ITSELF: list[object] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (float("nan"), "nan"),
        ([float("inf")], "[inf]"),
        ([10**5000], "<str() of it raised ValueError>"),
        (HOLDS_ITSELF, "[[...]]"),
        (Odd(), "<str() of it raised RuntimeError>"),
        ({"in": [Odd()]}, "<str() of it raised RuntimeError>"),
    ],
)
def test_value_that_json_has_not_is_written_as_text(value, text):
    line = JsonFormatter().format(record(msg="paid", odd=value, to=[1]))

    found = json.loads(line, parse_constant=pytest.fail)
    assert (found["message"], found["odd"], found["to"]) == ("paid", text, [1])


def test_traceback_is_part_of_the_object():
    try:
        raise ValueError("no")
    except ValueError:
        line = JsonFormatter().format(record(msg="failed", exc_info=sys.exc_info()))

    assert json.loads(line)["exception"].endswith("ValueError: no")


@pytest.mark.django_db(transaction=True)
def test_all_lines_of_runqueue_are_json_if_wanted(runqueue):
    child = runqueue("--log-format", "json", *MANY)
    result = timely.talk.enqueue("ada", 1)
    result.wait(LONG)
    tasks.fail.enqueue().wait(LONG)
    child.terminate()
    assert child.wait(LONG) == 0

    lines = [json.loads(line) for line in log_of(child).splitlines()]

    own = [line for line in lines if line["logger"] == "shop.orders"]
    assert own and {(line["job_id"], line["attempt"]) for line in own} == {(result.id, 1)}
    assert {line["task"] for line in own} == {"tests.timely.talk"}
    assert any("process_name" in line for line in lines)
    failed = [line for line in lines if line["level"] == "ERROR"]
    assert failed and all("Traceback" in line["exception"] for line in failed)


LOG_OF_THE_PROJECT = """
from tests.settings import *

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"]},
}
"""


@pytest.mark.django_db(transaction=True)
def test_json_is_said_to_have_no_effect_beside_handlers_of_the_project(runqueue, tmp_path):
    (tmp_path / "own_log.py").write_text(LOG_OF_THE_PROJECT)

    child = runqueue(
        *["--drain", "--log-format", "json", *MANY],
        PYTHONPATH=str(tmp_path),
        DJANGO_SETTINGS_MODULE="own_log",
    )

    assert child.wait(LONG) == 0
    assert log_of(child).count("--log-format json has no effect") == 1
