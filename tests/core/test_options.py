"""OPTIONS, queue names and system checks: errors name the bad value and the remedy."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.checks import run_checks
from django.db import connections
from django.test import override_settings

from django_dbqueue import Exponential
from django_dbqueue.compat import task_backends
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.exceptions import InvalidOption
from django_dbqueue.models import Job

from .. import tasks

OURS = "django_dbqueue.backend.DatabaseBackend"

# Some of Django's own checks query the database's features.
pytestmark = pytest.mark.django_db(databases=["default", "other"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"thread": 4}, r"'thread' is not an option. Did you mean 'threads'\?"),
        ({"MAX_ATTEMPTS": 4}, r"'MAX_ATTEMPTS' is not an option. Did you mean 'max_attempts'\?"),
        ({"zzz": 1}, r"'zzz' is not an option. Choose from database, max_attempts"),
        ({"threads": 0}, r"threads=0 is not a whole number of at least 1"),
        ({"threads": "8"}, r"threads='8' is not a whole number"),
        ({"threads": True}, r"threads=True is not a whole number"),
        ({"prefetch": -1}, r"prefetch=-1 is not a whole number of at least 0"),
        ({"poll_interval": 0}, r"poll_interval=0 is not a number of seconds above 0"),
        ({"shutdown_timeout": "10"}, r"shutdown_timeout='10' is not a number of seconds"),
        (None, r"None is not a dict"),
        ({"embedded": "no"}, r"embedded='no' is not True or False"),
        ({"max_attempts": 10**6}, r"max_attempts=1000000 is over 32767. Lower it"),
        ({"threads": 10**9}, r"threads=1000000000 is over 1000. Lower it"),
        ({"max_jobs": 2**40}, r"max_jobs=1099511627776 is over 2147483647. Lower it"),
        ({"keep_failed": 10**10}, r"over 1,000,000,000 seconds, 31 years. Give None for no bound"),
        ({"poll_interval": 1e10}, r"over 1,000,000,000 seconds, 31 years. Lower it"),
        ({"timeout": timedelta(minutes=5)}, r"is not a number of seconds. Give 300\."),
        ({"task_modules": ["shop/reports.py"]}, r"'shop/reports.py' is no module's path. Give"),
        ({"database": ""}, r"database='' is not an alias in DATABASES. Give such as 'default'"),
        ({"database": 3}, r"database=3 is not an alias in DATABASES"),
        ({"queues": " , "}, r"queues is empty"),
        ({"queues": 5}, r"queues=5 is not a list of names"),
        ({"queues": [1]}, r"queues=\(1,\) is not a list of names"),
        ({"backoff": 3}, r"backoff=3 is not callable"),
        ({"timeout": 1e-9}, r"timeout=1e-09 is under a microsecond. Raise it."),
        ({"name": "a b", "per_queue": {"mail": {"timeout": 5}}}, r"^name='a b' is not a name"),
        ({"receivers": {"worker_start": "a.b"}, "per_queue": {"mail": {}}}, r"^receivers: 'worker"),
        ({"timeout": 0}, r"timeout=0 is not a number of seconds above 0"),
        ({"timeout": True}, r"timeout=True is not a number of seconds"),
        ({"keep_failed": "90 days"}, r"keep_failed='90 days' is not a number of seconds"),
        ({"delete_on_success": 1}, r"delete_on_success=1 is not True or False"),
        ({"hidden": 5}, r"hidden=5 is not a list of names"),
        ({"per_queue": ["mail"]}, r"per_queue=\['mail'\] is not a dict"),
        ({"silence_polling": "no"}, r"silence_polling='no' is not True or False"),
        (
            {"receivers": {"worker_strated": "shop.monitoring.f"}},
            r"receivers: 'worker_strated' is not a signal of django_dbqueue.signals. "
            r"Did you mean 'worker_started'\?",
        ),
        ({"receivers": ["worker_started"]}, r"receivers: \['worker_started'\] is not a dict"),
        ({"receivers": {"worker_started": "f"}}, r"\('f',\), which is not a dotted path"),
        ({"receivers": {"worker_started": ""}}, r"which is not a dotted path. Give such as"),
        ({"receivers": {"worker_started": "shop..f"}}, r"which is not a dotted path"),
        ({"receivers": {"worker_started": ["a.b", 5]}}, r"which is not a dotted path"),
        ({"receivers": {"worker_started": print}}, r"which is not a dotted path"),
        ({"per_queue": {"mail": 30}}, r"per_queue\['mail'\]: 30 is not a dict"),
        (
            {"per_queue": {"mail": {"timeouts": 3}}},
            r"per_queue\['mail'\]: 'timeouts' is not an option. Did you mean 'timeout'\?",
        ),
        (
            {"per_queue": {"mail": {"timeout": -3}}},
            r"per_queue\['mail'\]: timeout=-3 is not a number of seconds above 0",
        ),
        (
            {"per_queue": {"mail": {"ready_within": 0}}},
            r"per_queue\['mail'\]: ready_within=0 is not a number of seconds above 0",
        ),
        (
            {"per_queue": {"mail": {"threads": 3}}},
            r"per_queue\['mail'\]: 'threads' is not an option. Choose from max_attempts",
        ),
        ({"beat_interval": 20}, r"dead_after=30.0 is under three times beat_interval=20"),
        ({"release": 7}, r"release=7 is not one line of up to 100 characters"),
        ({"release": "v" * 101}, r"is not one line of up to 100 characters. Give such as"),
        ({"release": "v1\n"}, r"release='v1\\n' is not one line"),
        ({"max_age": 0}, r"max_age=0 is not a number of seconds above 0"),
        ({"max_age": "1 h"}, r"max_age='1 h' is not a number of seconds"),
        ({"max_memory": 0}, r"max_memory=0 is not a whole number of at least 1"),
        ({"max_memory": "512M"}, r"max_memory='512M' is not a whole number"),
        ({"workers": 2}, r"workers=2 is not a list of dicts. Give \[{'queues'"),
        ({"workers": {"queues": "*"}}, r"workers={'queues': '\*'} is not a list of dicts"),
        ({"workers": "mail"}, r"workers='mail' is not a list of dicts"),
        ({"workers": ["mail"]}, r"workers\[0\]: 'mail' is not a dict"),
        (
            {"workers": [{}, {"thread": 4}]},
            r"workers\[1\]: 'thread' is not an option. Did you mean 'threads'\?",
        ),
        (
            {"workers": [{"timeout": 4}]},
            r"workers\[0\]: 'timeout' is not an option. Choose from queues, processes",
        ),
        ({"workers": [{"workers": []}]}, r"workers\[0\]: 'workers' is not an option"),
        ({"workers": [{1: 2}]}, r"workers\[0\]: 1 is not an option"),
        ({"workers": [{"threads": 0}]}, r"workers\[0\]: threads=0 is not a whole number"),
        ({"workers": [{"queues": []}]}, r"workers\[0\]: queues is empty"),
        ({"workers": [{"queues": None}]}, r"workers\[0\]: queues=None is not a list of names"),
        ({"workers": [{"max_memory": 1.5}]}, r"workers\[0\]: max_memory=1.5 is not a whole"),
        (
            {"workers": [{"poll_interval": -1}]},
            r"workers\[0\]: poll_interval=-1 is not a number of seconds above 0",
        ),
    ],
)
def test_invalid_option_is_named_with_its_remedy(given, message):
    with pytest.raises(InvalidOption, match=message):
        Options.from_settings(given)


def test_per_queue_options_override_backend_options():
    options = Options.from_settings(
        {"timeout": 600, "max_attempts": 3, "per_queue": {"mail": {"timeout": 30}}}
    )

    assert (options.of("mail").timeout, options.of("mail").max_attempts) == (30, 3)
    assert options.of("default").timeout == 600


GROUPS = [{"queues": "mail*", "threads": 5, "processes": 2}, {"queues": ["*"]}]


def test_group_of_workers_overrides_backend_options():
    options = Options.from_settings({"threads": 3, "max_age": 60, "workers": GROUPS})

    mail, others = [options.changed(**group) for group in options.groups({})]

    assert (mail.queues, mail.threads, mail.processes, mail.max_age) == (("mail*",), 5, 2, 60)
    assert (others.queues, others.threads, others.processes) == (("*",), 3, 1)


def test_workers_without_groups_are_one_group():
    assert Options().groups({"threads": 2}) == [{"threads": 2}]
    assert Options.from_settings({"workers": []}).groups({}) == [{}]


def test_command_line_applies_to_every_group_and_its_queues_replace_them():
    options = Options.from_settings({"workers": GROUPS})

    assert [group["threads"] for group in options.groups({"threads": 1})] == [1, 1]
    assert options.groups({"queues": "reports"}) == [{"queues": "reports"}]


@pytest.mark.parametrize("queues", ["a*b", ["mail", "nowhere"]])
def test_invalid_queues_of_a_group_are_a_system_check_error(queues):
    own = {"workers": [{"queues": "mail"}, {"queues": queues}]}
    given = {"BACKEND": OURS, "QUEUES": ["mail"], "OPTIONS": {"database": "default", **own}}
    with override_settings(TASKS={"default": given}):
        found = [message.msg for message in run_checks() if message.id == "dbqueue.E001"]

    assert len(found) == 1
    assert "TASKS['default']['OPTIONS']: '" in found[0]


def test_task_options_precede_queue_and_backend_options():
    own = {
        "database": "default",
        "timeout": 600,
        "per_queue": {"mail": {"timeout": 30, "max_attempts": 5}},
    }
    with override_settings(TASKS={"default": {"BACKEND": OURS, "QUEUES": [], "OPTIONS": own}}):
        for task in (
            tasks.add,
            tasks.add.using(queue_name="mail"),
            tasks.loop_too_long.using(queue_name="mail"),
        ):
            task.enqueue(*[1] if task.func is tasks.add.func else [])

    stored = [(job.timeout.total_seconds(), job.max_attempts) for job in Job.objects.order_by("pk")]
    assert stored == [(600, 1), (30, 5), (2, 5)]


def test_a_bad_option_is_a_system_check_error():
    with override_settings(TASKS={"default": {"BACKEND": OURS, "OPTIONS": {"thread": 4}}}):
        found = [message for message in run_checks() if message.id == "dbqueue.E001"]

    assert (
        "TASKS['default']['OPTIONS']: 'thread' is not an option. Did you mean 'threads'?"
        in found[0].msg
    )


@pytest.mark.parametrize("queues", ["default", [1], ["a b", "x*"], ["-a"], ["x" * 101]])
def test_invalid_queue_names_are_a_system_check_error(queues):
    with override_settings(TASKS={"default": {"BACKEND": OURS, "QUEUES": queues}}):
        found = [message.msg for message in run_checks() if message.id == "dbqueue.E005"]

    (said,) = found
    assert f"TASKS['default']['QUEUES']: {queues!r} is not a list of queue names. A name" in said


def test_misplaced_option_is_a_system_check_warning():
    with override_settings(TASKS={"default": {"BACKEND": OURS, "threads": 3}}):
        found = [message.msg for message in run_checks() if message.id == "dbqueue.W003"]

    assert found == ["TASKS['default']: nothing reads 'threads'. Does it belong in 'OPTIONS'?"]


def test_unknown_queue_for_workers_is_a_system_check_error():
    with override_settings(TASKS={"default": {"BACKEND": OURS, "OPTIONS": {"queues": ["mail"]}}}):
        found = [message.msg for message in run_checks() if message.id == "dbqueue.E001"]

    assert "'mail' matches no queue. The backend's QUEUES are default." in found[0]


def test_unknown_queue_in_per_queue_is_a_system_check_error():
    given = {
        "BACKEND": OURS,
        "QUEUES": ["default", "mail"],
        "OPTIONS": {"per_queue": {"mial": {"timeout": 3}}},
    }
    with override_settings(TASKS={"default": given}):
        found = [message.msg for message in run_checks() if message.id == "dbqueue.E001"]

    assert found == [
        "TASKS['default']['OPTIONS']: per_queue: 'mial' is not in QUEUES. Did you mean 'mail'?"
    ]


@pytest.mark.parametrize(
    "given", [{"first": -1}, {"first": "5"}, {"cap": None}, {"jitter": 7}, {"factor": float("inf")}]
)
def test_invalid_backoff_is_refused_at_construction(given):
    with pytest.raises(ValueError, match=rf"Exponential\({next(iter(given))}="):
        Exponential(**given)


def test_unknown_database_is_a_system_check_error():
    with override_settings(
        TASKS={"default": {"BACKEND": OURS, "OPTIONS": {"database": "nowhere"}}}
    ):
        found = [message.msg for message in run_checks() if message.id == "dbqueue.E002"]

    assert found == [
        "TASKS['default'] names the unknown database 'nowhere'. Choose from default, other."
    ]


@pytest.mark.parametrize(
    ("first", "second", "warned"),
    [(["a"], ["b"], False), (["a", "b"], ["b"], True), ([], ["b"], True), (None, None, True)],
)
def test_backends_that_share_a_queue_are_a_system_check_warning(first, second, warned):
    backends = {
        "one": {"BACKEND": OURS, "QUEUES": first},
        "two": {"BACKEND": OURS, "QUEUES": second},
    }
    given = {
        alias: {k: v for k, v in backend.items() if v is not None}
        for alias, backend in backends.items()
    }
    with override_settings(TASKS=given):
        found = [message.msg for message in run_checks() if message.id == "dbqueue.W002"]

    assert bool(found) == warned
    assert all("TASKS['one'] and TASKS['two']" in message for message in found)


def test_time_zone_of_database_is_a_system_check_error(monkeypatch):
    monkeypatch.setattr(type(connections["default"]), "timezone_name", "Europe/Paris")

    found = [message for message in run_checks() if message.id == "dbqueue.E004"]

    assert bool(found) == (connections["default"].vendor != "postgresql")


def test_database_without_autocommit_is_a_system_check_error(monkeypatch):
    monkeypatch.setitem(connections["default"].settings_dict, "AUTOCOMMIT", False)

    assert "dbqueue.E013" in [message.id for message in run_checks()]


def test_settings_can_be_overridden():
    with override_settings(
        TASKS={"default": {"BACKEND": OURS, "OPTIONS": {"threads": 3, "queues": "mail, bulk*"}}}
    ):
        config = task_backends["default"].config
        assert (config.threads, config.queues) == (3, ("mail", "bulk*"))
    assert task_backends["default"].config.threads == Options().threads


@pytest.mark.parametrize("patterns", [("mail", "-mail"), ("*", "-*"), ("a*", "-a", "-ab*")])
def test_selection_that_excludes_everything_is_refused(patterns):
    """The worker said that it runs, and served nothing."""
    with pytest.raises(InvalidOption, match="excludes all of its queues"):
        QueueSelector(patterns, frozenset(["mail", "a", "abc"]))


@pytest.mark.parametrize("queue", [5, None])
def test_options_of_a_queue_need_its_name(queue):
    options = Options.from_settings({"per_queue": {queue: {"timeout": 1}}})

    with pytest.raises(InvalidOption, match=f"per_queue: {queue} is not a queue name. Give text"):
        options.check_queues(["mail"])


def test_command_line_overrides_settings():
    assert Options.from_settings({"threads": 3}).changed(threads=5).threads == 5


@pytest.mark.parametrize(
    ("patterns", "allowed", "ranks"),
    [
        (["*"], [], {"a": 0, "b": 0}),
        (["b", "a"], [], {"a": 1, "b": 0, "c": None}),
        (["mail*", "*"], [], {"mail": 0, "mail-bulk": 0, "a": 1}),
        (["-a"], [], {"a": None, "b": 0}),
        (["*", "-tmp-*"], [], {"tmp-1": None, "tmp": 0}),
        (["*"], ["a", "b"], {"a": 0, "c": None}),
    ],
)
def test_a_selector_ranks_queues(patterns, allowed, ranks):
    selector = QueueSelector(tuple(patterns), frozenset(allowed))

    assert {queue: selector.position(queue) for queue in ranks} == ranks


@pytest.mark.parametrize("pattern", ["a*b", "**", "-", "", "-a*b"])
def test_invalid_queue_pattern_is_refused(pattern):
    with pytest.raises(InvalidOption, match="is not a queue"):
        QueueSelector((pattern,))


def test_unknown_queue_is_refused():
    with pytest.raises(InvalidOption, match=r"'mial' matches no queue\."):
        QueueSelector(("mial",), frozenset({"mail", "default"}))


def test_unknown_allowed_command_is_a_system_check_error(settings):
    settings.TASKS = {
        "default": {
            "BACKEND": "django_dbqueue.backend.DatabaseBackend",
            "OPTIONS": {"allow_commands": ["clearsesions", "clearsessions"]},
        }
    }

    (found,) = [message.msg for message in run_checks() if message.id == "dbqueue.E007"]

    assert "'clearsesions' is not a management command" in found
