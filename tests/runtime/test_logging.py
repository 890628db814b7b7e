"""Lines that nobody hears are not made; those that somebody hears are."""

from __future__ import annotations

import logging

import pytest
from django.test import override_settings
from django.utils.log import RequireDebugTrue

from django_dbqueue.log import JobFields
from django_dbqueue.runtime.logging_setup import skip_unheard_lines

from .. import tasks, timely
from ..conftest import LONG, log_of
from ..management.test_runqueue import MANY


@pytest.fixture
def logger():
    """One whose lines go nowhere else."""
    logger = logging.Logger("one")
    logger.propagate = False
    return logger


def handler(level: int = logging.NOTSET, *filters: logging.Filter) -> logging.Handler:
    made = logging.NullHandler(level)
    for each in filters:
        made.addFilter(each)
    return made


def makes_info(logger: logging.Logger) -> bool:
    skip_unheard_lines(logger)
    assert logger.isEnabledFor(logging.WARNING)
    return logger.isEnabledFor(logging.INFO)


def test_lines_that_no_handler_takes_are_not_made(logger):
    assert not makes_info(logger)


@override_settings(DEBUG=False)
def test_djangos_own_settings_take_none_without_debug(logger):
    logger.addHandler(handler(logging.INFO, RequireDebugTrue()))
    logger.addHandler(handler(logging.ERROR))

    assert not makes_info(logger)


@override_settings(DEBUG=True)
def test_and_take_all_with_it(logger):
    logger.addHandler(handler(logging.INFO, RequireDebugTrue()))

    assert makes_info(logger)


def test_a_handler_further_up_hears_too(logger):
    logger.propagate, logger.parent = True, logging.Logger("parent")
    logger.parent.propagate = False
    logger.parent.addHandler(handler(logging.INFO))

    assert makes_info(logger)


def test_a_filter_that_may_change_its_mind_counts_as_one_that_hears(logger):
    logger.addHandler(handler(logging.INFO, logging.Filter("another")))

    assert makes_info(logger)


def test_a_level_that_was_given_stands(logger):
    logger.setLevel(logging.INFO)

    assert makes_info(logger)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("task", ["talk", "talk_async"])
def test_line_that_a_task_logs_has_the_fields_of_its_job(task, caplog, worker):
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
def test_verbosity_says_which_lines_runqueue_shows(runqueue, verbosity):
    tasks.add.enqueue(1)

    child = runqueue("--drain", "-v", verbosity, *MANY)

    assert child.wait(LONG) == 0
    assert ("supervisor@" in log_of(child)) == (verbosity != "0")
    assert ("starts (attempt 1)" in log_of(child)) == (verbosity == "2")
