"""``OPTIONS["alerts"]``: the targets of notifications, and the problems that each is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from .option_values import FOREVER, as_names, is_path, must_know

# What the queue's own checks are called: see doctor/queue.py.
CHECKS = (
    *("processes", "silent-processes", "quiet-processes", "lag", "overdue-recurring-tasks"),
    *("failures", "unknown-tasks", "hanged-jobs", "stalled-operations", "interrupted-moves"),
    *("orphaned-jobs", "retention", "undelivered-alerts"),
)
SEVERITIES = ("warning", "critical")
# The ways to notify: an entry has one of these.
WAYS = ("mail", "webhook", "function")
# The value of "mail" for the addresses in settings.ADMINS.
ADMINS = "ADMINS"


@dataclass(frozen=True, kw_only=True)
class AlertTarget:
    """One entry of ``OPTIONS["alerts"]``.

    way: "mail", "webhook" or "function". to: the addresses, the URL, or the dotted path.
    secret: the key that signs a webhook's messages; "" for none.
    checks: the checks of checkqueue whose findings are sent; empty for all.
    severity: "critical" for the problems with which jobs do not run, or "warning" for all.
    after: the seconds that a problem has to last before it is sent. Failures are sent at once.
    cooldown: the seconds before a problem that comes back is sent again.
    send_resolved: whether to send that a problem is over.
    """

    way: str
    to: tuple[str, ...]
    secret: str = ""
    checks: tuple[str, ...] = ()
    severity: str = "warning"
    after: float = 60.0
    cooldown: float = 3600.0
    send_resolved: bool = True

    @property
    def name(self) -> str:
        """A name for its rows and log lines. It tells no secret, as a webhook's path often is."""
        if self.way != "webhook":
            shown = ", ".join(self.to)
            if len(shown) <= 80:
                return f"{self.way} {shown}"
        else:
            shown = urlsplit(self.to[0]).hostname or ""
        digest = hashlib.sha256("\n".join(self.to).encode()).hexdigest()[:8]
        return f"{self.way} {shown[:70]} {digest}"

    def wants(self, check: str, severity: str) -> bool:
        """Return whether a problem is to be sent to it."""
        return (not self.checks or check in self.checks) and (
            self.severity == "warning" or severity == "critical"
        )

    @classmethod
    def from_settings(cls, given: Mapping[str, Any]) -> AlertTarget:
        """Return the target of a valid entry."""
        (way,) = set(WAYS) & set(given)
        own = {name: given[name] for name in OF_A_TARGET if name in given}
        if "checks" in own:
            own["checks"] = as_names(own["checks"])
        to: Any = as_names(given[way]) if way == "mail" else (given[way],)
        return cls(way=way, to=to, **own)


# What an entry accepts beside its way.
OF_A_TARGET = tuple(each.name for each in fields(AlertTarget) if each.default is not MISSING)


def problems_of_alerts(alerts: object) -> Iterator[str]:
    """Yield why ``OPTIONS["alerts"]`` cannot be used. Raises InvalidOption for unknown keys."""
    if not isinstance(alerts, tuple):
        # Not its value, which may have a secret.
        found = type(alerts).__name__
        yield f"alerts is {found}, and not a list of dicts. Give [{{'mail': 'ADMINS'}}]."
        return
    for place, own in enumerate(alerts):
        where = f"alerts[{place}]: "
        must_know(own, (*WAYS, *OF_A_TARGET), where)
        for problem in _problems_of_an_alert(own):
            yield where + problem
            return
    names = [AlertTarget.from_settings(each).name for each in alerts]
    for place, name in enumerate(names):
        if name in names[:place]:
            yield f"alerts[{place}] is {name} a second time. Remove it, or join the entries."


def _problems_of_an_alert(own: Mapping[str, Any]) -> Iterator[str]:
    ways = [way for way in WAYS if way in own]
    if len(ways) != 1:
        said = " and ".join(map(repr, ways)) or "none of 'mail', 'webhook' and 'function'"
        yield f"it has {said}. Give each target an entry of its own, with one of these."
        return
    to = own[ways[0]]
    if ways == ["mail"]:
        if not _are_addresses(as_names(to)):
            yield (
                f"mail={to!r} is no list of addresses. Give ['ops@example.com'], or 'ADMINS' for "
                "those of the setting."
            )
    elif ways == ["webhook"]:
        if not _is_url(to):
            # Not its value, which is often secret.
            yield (
                "webhook is no URL, or has a user's name, spaces or a wrong port. Give such as "
                "'https://example.com/queue'."
            )
    elif not is_path(to):
        yield f"function={to!r} is no dotted path. Give such as 'shop.alerts.page'."
    secret = own.get("secret", "")
    if not isinstance(secret, str):
        yield f"secret is {type(secret).__name__}. Give text."
    elif "secret" in own and ways != ["webhook"]:
        yield "secret signs the messages of a webhook. Remove it."
    elif "secret" in own and not secret:
        yield "secret is empty. Give the secret, or remove it."
    checks = as_names(own.get("checks", ["lag"]))
    if not (isinstance(checks, tuple) and checks and all(isinstance(n, str) for n in checks)):
        yield f"checks={own['checks']!r} is not a list of names. Give such as ['lag']."
        return
    must_know(dict.fromkeys(checks), CHECKS, "checks: ", "a check of the queue")
    if own.get("severity", "warning") not in SEVERITIES:
        yield f"severity={own['severity']!r} is not 'warning' or 'critical'. Change it."
    for name in ("after", "cooldown"):
        value = own.get(name, 0)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and 0 <= value < FOREVER):
            yield f"{name}={value!r} is not a number of seconds of at least 0. Change it."
    if not isinstance(own.get("send_resolved", True), bool):
        yield f"send_resolved={own['send_resolved']!r} is not True or False. Change it."


def _is_url(given: object) -> bool:
    if not isinstance(given, str) or not given.isprintable() or " " in given:
        return False
    try:
        parts = urlsplit(given)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    is_web = parts.scheme in ("http", "https") and bool(parts.hostname)
    return is_web and has_port and "@" not in parts.netloc and given.isascii()


def _are_addresses(names: object) -> bool:
    if not isinstance(names, tuple) or not names:
        return False
    return names == (ADMINS,) or all(isinstance(each, str) and "@" in each for each in names)
