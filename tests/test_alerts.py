"""Alerts: problems that the checks find are sent by mail, webhook or function, once each."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from django.core import mail
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import connections
from django.utils import timezone

from django_dbqueue.contrib.mail import EmailBackend
from django_dbqueue.core.alert_targets import CHECKS, AlertTarget
from django_dbqueue.core.options import Options
from django_dbqueue.doctor import queue as queue_checks
from django_dbqueue.doctor.database import database_of
from django_dbqueue.doctor.finding import Finding, Severity
from django_dbqueue.doctor.queue import undelivered_alerts
from django_dbqueue.doctor.runner import OF_THE_QUEUE, name_of
from django_dbqueue.engine.alerts import note, note_sent, note_unsent, prune_alerts, take_due
from django_dbqueue.exceptions import InvalidOption
from django_dbqueue.models import Alert, Failure, Job
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.runtime import alert_delivery
from django_dbqueue.runtime.alert_watch import AlertWatch
from django_dbqueue.testing import drain

from . import tasks
from .conftest import LONG, a_process, log_of, until, with_options

pytestmark = [
    pytest.mark.django_db,
    # In favour of MAILERS, since Django 6.1.
    pytest.mark.filterwarnings("ignore:The EMAIL_BACKEND setting is deprecated"),
    pytest.mark.filterwarnings("ignore:Django 2028 will not have a default mailer"),
]

SECRET = "whsec_" + base64.b64encode(b"a key of 24 bytes or so.").decode()
TARGET = AlertTarget(way="function", to=("tests.test_alerts.told",), after=0.0)
LATE = ("lag", "mail")
called: list[list[Alert]] = []


def told(alerts: list[Alert]) -> None:
    called.append(alerts)


def raising(alerts: list[Alert]) -> None:
    raise ValueError("The pager is off.")


class Queued(EmailBackend):
    sent_by = "django.core.mail.backends.locmem.EmailBackend"


def a_problem(**values: Any) -> Finding:
    given = {
        "what": "A job has been ready for 0:20:00.",
        "why": "The workers do not keep up.",
        "remedy": "More threads.",
        "severity": Severity.CRITICAL,
    }
    return Finding(**{**given, **values})


EVENT = a_problem(what="Failure Timeout: 3 jobs failed", is_event=True)


def examine(*keys: tuple[str, str], target: AlertTarget = TARGET, event: bool = False) -> None:
    note("default", target, {key: EVENT if event else a_problem() for key in keys})


def due(target: AlertTarget = TARGET) -> list[str]:
    """Send what is due, and return it in words."""
    taken = take_due("default", target)
    note_sent("default", taken)
    return [f"{'over' if each.is_over else 'active'} {each}" for each in taken]


def pass_time(seconds: float) -> None:
    """Let the alerts be as much older."""
    for alert in Alert.objects.all():
        for name in ("opened_at", "found_at", "ended_at", "due_at", "sending_until", "sent_at"):
            if at := getattr(alert, name):
                setattr(alert, name, at - timedelta(seconds=seconds))
        alert.save()


class TestProblem:
    def test_is_sent_once_while_it_lasts(self):
        for _round in range(3):
            examine(LATE)
            pass_time(30)
            assert due() == (["active lag mail"] if _round == 0 else [])

    def test_is_sent_only_if_it_lasts(self):
        target = AlertTarget(way="function", to=("a.b",), after=60.0)
        examine(LATE, target=target)
        pass_time(40)
        assert due(target) == []
        examine(LATE, target=target)
        pass_time(30)
        examine(LATE, target=target)
        assert due(target) == ["active lag mail"]

    def test_that_was_short_is_never_sent(self):
        target = AlertTarget(way="function", to=("a.b",), after=120.0)
        examine(LATE, target=target)
        pass_time(100)
        examine(target=target)
        pass_time(100)
        assert due(target) == []
        assert Alert.objects.get().is_over

    def test_that_was_short_is_not_sent_when_its_time_would_come(self):
        target = AlertTarget(way="function", to=("a.b",), after=60.0)
        examine(LATE, target=target)
        pass_time(15)
        examine(LATE, target=target)
        pass_time(15)
        examine(target=target)
        pass_time(31)
        examine(target=target)
        assert due(target) == []
        pass_time(31)
        assert due(target) == []
        assert Alert.objects.get().is_over

    def test_is_not_sent_before_anybody_has_looked_again(self):
        target = AlertTarget(way="function", to=("a.b",), after=60.0)
        examine(LATE, target=target)
        pass_time(61)
        assert due(target) == []

    def test_has_to_last_anew_if_nobody_looked_for_hours(self):
        target = AlertTarget(way="function", to=("a.b",), after=60.0)
        examine(LATE, target=target)
        pass_time(8 * 3600)
        examine(LATE, target=target)
        assert due(target) == []
        for _look in range(3):
            pass_time(30)
            examine(LATE, target=target)
        assert due(target) == ["active lag mail"]

    def test_of_a_target_that_was_removed_is_not_active_nor_undelivered(self):
        examine(LATE)
        for _try in range(3):
            note_unsent("default", take_due("default", TARGET), "HTTP 500")
            for _look in range(4):
                pass_time(30)
                examine(LATE)
        assert Alert.objects.active().count() == Alert.objects.undelivered().count() == 1
        pass_time(7200)
        assert not Alert.objects.active().exists()
        assert not Alert.objects.undelivered().exists()

    def test_is_over_after_a_minute_without_it(self):
        examine(LATE)
        assert due() == ["active lag mail"]
        pass_time(30)
        examine()
        assert due() == []
        pass_time(40)
        examine()
        assert due() == ["over lag mail"]
        pass_time(40)
        examine()
        assert due() == []

    def test_is_over_without_a_word_if_the_target_wants_none(self):
        target = AlertTarget(way="function", to=("a.b",), after=0.0, send_resolved=False)
        examine(LATE, target=target)
        assert due(target) == ["active lag mail"]
        pass_time(70)
        examine(target=target)
        assert due(target) == []
        assert Alert.objects.get().is_over

    def test_that_comes_back_waits_for_the_cooldown(self):
        examine(LATE)
        due()
        pass_time(70)
        examine()
        assert due() == ["over lag mail"]
        examine(LATE)
        assert due() == []
        for _look in range(122):
            pass_time(30)
            examine(LATE)
        assert due() == ["active lag mail"]

    def test_that_comes_back_as_the_last_one_is_sent_is_not_taken_as_sent(self):
        examine(LATE)
        due()
        pass_time(70)
        examine()
        assert due() == ["over lag mail"]
        # SQLite stores milliseconds, in which several statements run.
        Alert.objects.update(sent_at=now_plus(0.005))
        examine(LATE)
        assert not Alert.objects.get().is_sent

    def test_of_a_check_that_cannot_run_lasts(self):
        examine(LATE)
        due()
        pass_time(600)
        note("default", TARGET, {}, unknown={"lag"})
        assert due() == []
        assert not Alert.objects.get().is_over

    def test_event_is_sent_at_once_and_once_and_is_never_over(self):
        target = AlertTarget(way="function", to=("a.b",), after=3600.0)
        examine(("failures", "17"), target=target, event=True)
        assert due(target) == ["active failures 17"]
        pass_time(7200)
        examine(target=target)
        assert due(target) == []
        pass_time(7200)
        examine(("failures", "17"), target=target, event=True)
        pass_time(7200)
        assert due(target) == []
        assert Alert.objects.get().is_over
        examine(("failures", "17 again"), target=target, event=True)
        assert due(target) == ["active failures 17 again"]

    def test_event_that_could_not_be_sent_is_sent_when_it_is_no_longer_found(self):
        examine(("failures", "17"), event=True)
        note_unsent("default", take_due("default", TARGET), "off")
        pass_time(600)
        examine()
        assert due() == ["active failures 17"]

    def test_of_each_target_is_its_own(self):
        other = AlertTarget(way="function", to=("a.b",), after=0.0)
        examine(LATE)
        examine(LATE, target=other)
        assert due() == due(other) == ["active lag mail"]

    def test_that_comes_back_while_its_end_is_sent_is_sent_after_the_cooldown(self):
        examine(LATE)
        due()
        pass_time(70)
        examine()
        being_sent = take_due("default", TARGET)
        examine(LATE)
        note_sent("default", being_sent)
        for _look in range(122):
            pass_time(30)
            examine(LATE)
        assert due() == ["active lag mail"]

    def test_does_not_end_while_it_is_being_sent(self):
        examine(LATE)
        being_sent = take_due("default", TARGET)
        Alert.objects.update(found_at=now_plus(-90))
        examine()
        note_sent("default", being_sent)
        examine()
        assert due() == ["over lag mail"]

    def test_that_was_found_long_ago_is_deleted(self):
        examine(LATE, ("processes", ""))
        Alert.objects.filter(check_name="lag").update(found_at=now_plus(-timedelta(days=91)))
        assert prune_alerts("default") == 1
        assert Alert.objects.get().check_name == "processes"


class TestRetries:
    def test_are_later_and_later(self):
        examine(LATE)
        pauses = []
        for _try in range(9):
            taken = take_due("default", TARGET)
            note_unsent("default", taken, "HTTP 500")
            alert = Alert.objects.get()
            pauses.append(round((alert.due_at - timezone.now()).total_seconds()))
            assert take_due("default", TARGET) == []
            for _look in range(0, pauses[-1] + 1, 15):
                pass_time(15)
                examine(LATE)
        assert pauses[:4] == [15, 30, 60, 120]
        assert pauses[-1] == 900
        assert due() == ["active lag mail"]
        assert (Alert.objects.get().tries, Alert.objects.get().error) == (0, "")

    def test_of_a_process_that_died_are_made_by_another_after_a_minute(self):
        examine(LATE)
        assert take_due("default", TARGET)
        assert take_due("default", TARGET) == []
        for _look in range(5):
            pass_time(15)
            examine(LATE)
        assert due() == ["active lag mail"]

    def test_that_fail_are_found_by_checkqueue(self, backend):
        assert list(undelivered_alerts(database_of(backend))) == []
        examine(LATE)
        for _try in range(3):
            note_unsent("default", take_due("default", TARGET), "HTTP 500\x1b[2J oh\nno")
            for _look in range(4):
                pass_time(30)
                examine(LATE)
        (finding,) = undelivered_alerts(database_of(backend))
        assert finding.what == (
            "Alerts cannot be sent by function tests.test_alerts.told: HTTP 500 [2J oh no"
        )
        assert finding.remedy == "python manage.py queue alerts --test"


@pytest.mark.django_db(transaction=True)
def test_two_dispatchers_send_each_alert_once():
    def examine_and_send(_number: int) -> list[str]:
        try:
            examine(LATE, ("processes", "worker"))
            return due()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        sent = [each for those in pool.map(examine_and_send, range(12)) for each in those]
    assert sorted(sent) == ["active lag mail", "active processes worker"]


class Receiver:
    """A webhook's server. ``answers`` are the status codes of the next requests, then 204."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append((dict(self.headers.items()), body))
                self.send_response(receiver.answers.pop(0) if receiver.answers else 204)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/in?key=hush"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _headers, body in self.requests]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


def an_alert(**values: Any) -> Alert:
    given = {
        "pk": 7,
        "check_name": "lag",
        "subject": "mail",
        "severity": "critical",
        "what": "A job has been ready.",
        "why": "No live worker.",
        "remedy": "Start one.",
        "opened_at": timezone.now(),
    }
    return Alert(**{**given, **values})


class TestWebhook:
    def test_message_is_signed_as_standard_webhooks_specifies(self, receiver):
        target = AlertTarget(way="webhook", to=(receiver.url,), secret=SECRET)
        over = an_alert(pk=8, ended_at=timezone.now())

        assert alert_delivery.deliver(target, [an_alert(), over]) == ""

        (headers, body), (message,) = receiver.requests[0], receiver.messages
        headers = {name.lower(): value for name, value in headers.items()}
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        wanted = base64.b64encode(
            hmac.new(b"a key of 24 bytes or so.", signed, hashlib.sha256).digest()
        )
        assert headers["webhook-signature"] == f"v1,{wanted.decode()}"
        assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
        assert message["type"] == "queue.alerts"
        assert message["text"] == "A job has been ready. (and 1 more alert)"
        assert [(each["check"], each["subject"], each["state"]) for each in message["alerts"]] == [
            ("lag", "mail", "active"),
            ("lag", "mail", "resolved"),
        ]

    def test_each_try_of_a_message_has_the_same_id(self, receiver):
        target = AlertTarget(way="webhook", to=(receiver.url,))
        receiver.answers = [500]
        alert = an_alert()
        assert alert_delivery.deliver(target, [alert]) == (
            "ConnectionError: HTTP 500 Internal Server Error"
        )
        assert alert_delivery.deliver(target, [alert]) == ""
        alert.ended_at = timezone.now()
        assert alert_delivery.deliver(target, [alert]) == ""
        first, second, third = (headers["Webhook-Id"] for headers, _body in receiver.requests)
        assert first == second != third

    @pytest.mark.parametrize("status", [301, 303, 307, 400, 410, 503])
    def test_any_other_answer_is_a_failure_and_no_redirect_is_followed(self, receiver, status):
        receiver.answers = [status]
        target = AlertTarget(way="webhook", to=(receiver.url,))
        assert f"HTTP {status}" in alert_delivery.deliver(target, [an_alert()])
        assert len(receiver.requests) == 1

    def test_error_and_name_do_not_tell_the_url(self, receiver):
        receiver.server.shutdown()
        receiver.server.server_close()
        target = AlertTarget(way="webhook", to=(receiver.url,))
        error = alert_delivery.deliver(target, [an_alert()])
        assert "refused" in error
        assert "hush" not in error + target.name
        assert target.name.startswith("webhook 127.0.0.1 ")


class TestMail:
    def test_has_the_problem_in_its_subject_and_all_in_its_text(self, settings):
        settings.ADMINS = ["ops@example.com"]
        target = AlertTarget(way="mail", to=("ADMINS",))
        over = an_alert(what="No worker is alive.", ended_at=timezone.now())
        assert alert_delivery.deliver(target, [over, an_alert(what="Two\nlines")]) == ""
        (sent,) = mail.outbox
        assert sent.to == ["ops@example.com"]
        assert sent.subject == "[Django] Two lines (and 1 more alert)"
        first, last = sent.body.split("\n\n")
        assert first.startswith("[critical] Two\nlines\nNo live worker.\nStart one.\nSince 20")
        assert last.startswith("Over: No worker is alive.\nFrom 20")

    def test_of_a_project_that_enqueues_its_mail_is_sent_at_once(self, settings):
        settings.EMAIL_BACKEND = f"{__name__}.Queued"
        target = AlertTarget(way="mail", to=("ops@example.com",))
        assert alert_delivery.deliver(target, [an_alert()]) == ""
        assert len(mail.outbox) == 1
        assert not Job.objects.exists()
        mail.send_mail("Hello", "", "a@example.com", ["b@example.com"])
        assert Job.objects.count() == 1

    def test_without_admins_is_an_error(self, settings):
        settings.ADMINS = []
        target = AlertTarget(way="mail", to=("ADMINS",))
        assert "ADMINS is empty" in alert_delivery.deliver(target, [an_alert()])


class TestFunction:
    def test_gets_the_alerts(self):
        called.clear()
        assert alert_delivery.deliver(TARGET, [an_alert()]) == ""
        assert [each.what for each in called[0]] == ["A job has been ready."]

    def test_error_is_returned(self):
        target = AlertTarget(way="function", to=(f"{__name__}.raising",))
        assert alert_delivery.deliver(target, [an_alert()]) == "ValueError: The pager is off."


class TestOptions:
    def test_are_read(self):
        options = Options.from_settings(
            {
                "alerts": [
                    {"mail": "ADMINS"},
                    {"mail": "a@example.com, b@example.com", "severity": "critical"},
                    {"webhook": "https://example.com/x", "secret": SECRET, "cooldown": 0},
                    {"function": "shop.alerts.page", "checks": ["lag", "failures"], "after": 5},
                ]
            }
        )
        first, second, third, fourth = options.alert_targets
        assert (first.way, first.to) == ("mail", ("ADMINS",))
        assert second.to == ("a@example.com", "b@example.com")
        assert not second.wants("lag", "warning")
        assert second.wants("lag", "critical")
        assert (third.secret, third.cooldown) == (SECRET, 0)
        assert fourth.wants("lag", "warning")
        assert not fourth.wants("processes", "critical")

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"webhook": "https://a.b", "secret": "x"}, "alerts is dict, and not a list of dicts"),
            ([17], "alerts[0]: 17 is not a dict"),
            ([{}], "alerts[0]: it has none of 'mail', 'webhook' and 'function'"),
            ([{"mail": "ADMINS", "webhook": "https://a.b"}], "it has 'mail' and 'webhook'"),
            ([{"mails": "ADMINS"}], "alerts[0]: 'mails' is not an option. Did you mean 'mail'?"),
            ([{"mail": "admins"}], "mail='admins' is no list of addresses"),
            ([{"mail": []}], "mail=[] is no list of addresses"),
            ([{"mail": [17]}], "mail=[17] is no list of addresses"),
            ([{"mail": None}], "mail=None is no list of addresses"),
            ([{"webhook": "ftp://a.b/c"}], "webhook is no URL"),
            ([{"webhook": "https://"}], "webhook is no URL"),
            ([{"webhook": "https://[::1"}], "webhook is no URL"),
            ([{"webhook": ["https://a.b"]}], "webhook is no URL"),
            ([{"webhook": "https://bot:hunter2@a.b/c"}], "has a user's name"),
            ([{"webhook": "https://a.b/c d"}], "spaces"),
            ([{"webhook": "https://a.b:port/c"}], "a wrong port"),
            ([{"webhook": "hooks.example.com/secret"}], "webhook is no URL"),
            ([{"function": "page"}], "function='page' is no dotted path"),
            ([{"function": told}], "is no dotted path"),
            ([{"webhook": "https://a.b", "secret": ""}], "secret is empty"),
            ([{"webhook": "https://a.b", "secret": b"x"}], "secret is bytes. Give text."),
            ([{"mail": "ADMINS", "secret": "x"}], "secret signs the messages of a webhook"),
            ([{"mail": "ADMINS", "checks": ["lags"]}], "Did you mean 'lag'?"),
            ([{"mail": "ADMINS", "checks": []}], "checks=[] is not a list of names"),
            ([{"mail": "ADMINS", "checks": 17}], "checks=17 is not a list of names"),
            ([{"mail": "ADMINS", "checks": [["lag"]]}], "checks=[['lag']] is not a list of names"),
            ([{"mail": "ADMINS", "severity": "high"}], "severity='high' is not 'warning' or"),
            ([{"mail": "ADMINS", "after": -1}], "after=-1 is not a number of seconds"),
            ([{"mail": "ADMINS", "after": True}], "after=True is not a number of seconds"),
            ([{"mail": "ADMINS", "cooldown": float("nan")}], "cooldown=nan is not a number"),
            ([{"mail": "ADMINS", "cooldown": timedelta(hours=1)}], "is not a number of seconds"),
            ([{"mail": "ADMINS", "send_resolved": "no"}], "send_resolved='no' is not True or"),
            ([{"mail": "ADMINS"}, {"mail": "ADMINS"}], "alerts[1] is mail ADMINS a second time"),
        ],
    )
    def test_that_cannot_be_used_are_refused_with_a_remedy(self, given, said):
        with pytest.raises(InvalidOption) as error:
            Options.from_settings({"alerts": given})
        assert said in str(error.value)
        assert "hunter2" not in str(error.value)
        assert "example.com/secret" not in str(error.value)

    def test_secret_is_not_shown(self):
        options = Options.from_settings({"alerts": [{"webhook": "https://a.b", "secret": "hush"}]})
        assert "hush" not in repr(options)

    def test_names_of_checks_are_those_of_checkqueue(self):
        assert sorted(CHECKS) == sorted(map(name_of, OF_THE_QUEUE))

    def test_function_that_is_missing_is_an_error_of_check(self, settings):
        settings.ADMINS = []
        alerts = [
            {"function": "tests.test_alerts.missing"},
            {"function": "tests.test_alerts.LATE"},
            {"mail": "ADMINS"},
        ]
        with with_options(alerts=alerts):
            found = {each.id: each.msg for each in run_checks() if "alerts" in each.msg}
        assert sorted(found) == ["dbqueue.E012", "dbqueue.W006"]


class TestCommand:
    def test_test_alert_is_sent_to_each_target(self, receiver, capsys):
        called.clear()
        alerts = [{"webhook": receiver.url}, {"function": TARGET.to[0]}]
        with with_options(alerts=alerts):
            call_command("queue", "alerts", "--test", "--json")
        assert [each["error"] for each in json.loads(capsys.readouterr().out)] == ["", ""]
        assert receiver.messages[0]["alerts"][0]["check"] == "test"
        assert len(called) == 1
        assert not Alert.objects.exists()

    def test_exit_code_tells_of_a_target_that_cannot_be_reached(self, capsys):
        with (
            with_options(alerts=[{"function": f"{__name__}.raising"}]),
            pytest.raises(SystemExit) as error,
        ):
            call_command("queue", "alerts", "--test")
        assert error.value.code == 1
        assert "The pager is off." in capsys.readouterr().out

    def test_without_targets_says_what_to_do(self):
        with pytest.raises(CommandError, match="Give such as 'alerts':"):
            call_command("queue", "alerts", "--test")

    def test_alerts_are_listed_those_that_last_first(self, capsys):
        examine(("processes", "worker"))
        pass_time(90)
        examine(LATE)
        call_command("queue", "alerts", "--json")
        rows = json.loads(capsys.readouterr().out)
        assert [(row["check"], row["ended"] is None) for row in rows] == [
            ("lag mail", True),
            ("processes worker", False),
        ]


class TestWatch:
    def test_new_failure_and_regression_are_sent(self, backend, transactional_db):
        called.clear()
        alerts = [{"function": TARGET.to[0], "checks": ["failures"]}]
        watch = AlertWatch(backend, backend.config.changed(alerts=alerts))
        (target,) = backend.config.changed(alerts=alerts).alert_targets

        def round_of_the_watch() -> list[str]:
            called.clear()
            watch._examine(database_of(backend), target)
            watch._send("default", target)
            return [each.what for those in called for each in those]

        tasks.fail.enqueue()
        drain()
        (said,) = round_of_the_watch()
        assert "1 job failed within the last hour" in said
        tasks.fail.enqueue()
        drain()
        assert round_of_the_watch() == []
        Failure.objects.resolve()
        assert round_of_the_watch() == []
        tasks.fail.enqueue()
        drain()
        (said,) = round_of_the_watch()
        assert "It was resolved, and has been seen again since" in said

    def test_problem_that_is_only_counted_is_not_over(self, backend, monkeypatch):
        target = AlertTarget(way="function", to=TARGET.to, after=0.0, checks=("lag",))
        watch = AlertWatch(backend, backend.config)
        a_process("worker@here:1:abc", details={"queues": "other", "threads": 8})

        def look(*late: str) -> list[str]:
            for age, queue in enumerate(late, 1):
                at = timezone.now() - timedelta(hours=age)
                Job.objects.create(task="t", queue=queue, run_after=at)
            pass_time(70)
            watch._examine(database_of(backend), target)
            return due(target)

        monkeypatch.setattr(queue_checks, "MOST", 1)
        assert look("mail") == ["active lag mail"]
        assert look("mail", "pdf") == ["active lag (others)", "active lag pdf"]
        assert look() == []
        Job.objects.filter(queue="mail").delete()
        assert sorted(look()) == ["over lag (others)", "over lag mail"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(240)
def test_runqueue_tells_that_no_worker_is_alive_and_that_this_is_over(runqueue, receiver):
    options = {
        "alerts": [
            {"webhook": receiver.url, "after": 0, "checks": ["processes"]},
            {"function": "tests.test_alerts.hang", "after": 0},
        ]
    }
    dispatcher = runqueue("--only", "dispatcher", DBQUEUE_OPTIONS=json.dumps(options))

    until(lambda: receiver.messages)
    (first,) = receiver.messages
    assert first["alerts"][0]["what"] == "No worker is alive."

    runqueue("--only", "workers", DBQUEUE_OPTIONS="{}")
    # Its last sign is older than it is: a minute without it would have to pass.
    until(lambda: Alert.objects.update(found_at=now_plus(-61)) and len(receiver.messages) > 1)
    assert receiver.messages[1]["alerts"][0]["state"] == "resolved"
    began = time.monotonic()
    dispatcher.terminate()
    assert dispatcher.wait(LONG) == 0
    assert time.monotonic() - began < 20
    assert "alerts: 1 sent by webhook 127.0.0.1" in log_of(dispatcher)


def hang(alerts: list[Alert]) -> None:
    time.sleep(3600)
