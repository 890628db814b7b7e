"""Delivery of alerts: by mail, to a webhook, or to a function of the project."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from django.conf import settings
from django.core.mail import EmailMessage
from django.utils import timezone
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from .. import __version__
from ..core.alert_targets import ADMINS, AlertTarget
from ..core.immediate_mail import is_immediate
from ..models import Alert

# Seconds that a webhook's server has for each part of its answer.
ANSWER = 10.0
# Characters of an error that are kept.
LONGEST = 500


def deliver(target: AlertTarget, alerts: list[Alert]) -> str:
    """Send all alerts in one message. Return why they could not be sent; "" if they were."""
    try:
        _WAYS[target.way](target, alerts)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:LONGEST]
    return ""


def test(target: AlertTarget) -> str:
    """Send a test alert. Return why it could not be sent; "" if it was."""
    what = _("This is a test: the alerts of the queue arrive here.")
    return deliver(
        target,
        [
            Alert(
                target=target.name,
                check_name="test",
                severity="warning",
                what=what,
                opened_at=timezone.now(),
            )
        ],
    )


def _mail(target: AlertTarget, alerts: list[Alert]) -> None:
    to = _admins() if target.to == (ADMINS,) else list(target.to)
    if not to:
        raise ValueError("ADMINS is empty. Add an address, or name one in 'mail'.")
    subject = f"{settings.EMAIL_SUBJECT_PREFIX}{subject_of(alerts)}"
    token = is_immediate.set(True)
    try:
        EmailMessage(subject, text_of(alerts), settings.SERVER_EMAIL, to).send()
    finally:
        is_immediate.reset(token)


def _admins() -> list[str]:
    # Pairs of a name and an address until Django 6.0.
    return [str(each if isinstance(each, str) else each[1]) for each in settings.ADMINS]


def subject_of(alerts: list[Alert]) -> str:
    """Return one line that says what is wrong, or what is over."""
    active = [each for each in alerts if not each.is_over]
    first = (active or alerts)[0]
    said = first.what if active else _("Over: %(problem)s") % {"problem": first.what}
    line = " ".join(said.split())
    if more := len(alerts) - 1:
        text = ngettext("and %(count)d more alert", "and %(count)d more alerts", more)
        line = f"{line[:150]} ({text % {'count': more}})"
    return line[:200]


def text_of(alerts: list[Alert]) -> str:
    """Return the alerts as text: those that last first, then those that are over."""
    return "\n\n".join(map(_paragraph, sorted(alerts, key=lambda each: each.is_over)))


def _paragraph(alert: Alert) -> str:
    since = _moment(alert.opened_at)
    if alert.ended_at:
        lines = [
            _("Over: %(problem)s") % {"problem": alert.what},
            _("From %(start)s to %(end)s.") % {"start": since, "end": _moment(alert.ended_at)},
        ]
    else:
        lines = [alert.what, alert.why, alert.remedy, _("Since %(time)s.") % {"time": since}]
        lines[0] = f"[{alert.severity}] {lines[0]}"
    return "\n".join(filter(None, lines))


def _moment(at: Any) -> str:
    return f"{timezone.localtime(at) if timezone.is_aware(at) else at:%Y-%m-%d %H:%M:%S %Z}".strip()


def _post(target: AlertTarget, alerts: list[Alert]) -> None:
    """POST the alerts as JSON, signed as Standard Webhooks 1.0.0 specifies."""
    message = {"type": "queue.alerts", "text": subject_of(alerts), "alerts": _as_data(alerts)}
    body = json.dumps(message).encode()
    states = [(each.pk, str(each.opened_at), each.is_over) for each in alerts]
    # The same for each try, so that a receiver can drop what it has already got.
    name = "msg_" + hashlib.sha256(json.dumps([target.name, states]).encode()).hexdigest()[:32]
    at = str(int(time.time()))
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"django-dbqueue/{__version__}",
        "webhook-id": name,
        "webhook-timestamp": at,
    }
    if target.secret:
        signed = hmac.digest(_key(target.secret), f"{name}.{at}.".encode() + body, "sha256")
        headers["webhook-signature"] = f"v1,{base64.b64encode(signed).decode()}"
    try:
        _opener.open(Request(target.to[0], body, headers), timeout=ANSWER).close()
    # The texts of errors may repeat the URL, which is often secret.
    except HTTPError as error:
        error.close()
        raise ConnectionError(f"HTTP {error.code} {error.reason}") from None
    except URLError as error:
        raise ConnectionError(str(error.reason)) from None
    except (HTTPException, ValueError) as error:
        raise ConnectionError(f"{type(error).__name__}, no answer of a web server") from None


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Follow no redirect: that would turn the POST into a GET."""


_opener = build_opener(_NoRedirect)


def _key(secret: str) -> bytes:
    if secret.startswith("whsec_"):
        try:
            return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
        except binascii.Error:
            pass
    return secret.encode()


def _as_data(alerts: list[Alert]) -> list[dict[str, object]]:
    return [
        {
            "check": each.check_name,
            "subject": each.subject,
            "severity": each.severity,
            "state": "resolved" if each.is_over else "active",
            "what": each.what,
            "why": each.why,
            "remedy": each.remedy,
            "since": each.opened_at.isoformat(),
            "ended_at": each.ended_at.isoformat() if each.ended_at else None,
        }
        for each in alerts
    ]


def _call(target: AlertTarget, alerts: list[Alert]) -> None:
    import_string(target.to[0])(alerts)


_WAYS: dict[str, Callable[[AlertTarget, list[Alert]], None]] = {
    "mail": _mail,
    "webhook": _post,
    "function": _call,
}
