"""Lines that nobody hears are not made; those that somebody hears are."""

from __future__ import annotations

import logging

import pytest
from django.test import override_settings
from django.utils.log import RequireDebugTrue

from django_dbqueue.runtime.log import skip_unheard_lines


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
