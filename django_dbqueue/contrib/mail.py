"""An e-mail backend that sends each message by a job."""

from __future__ import annotations

import base64
import email
import email.policy
import hashlib
from collections.abc import Mapping, Sequence
from email.message import MIMEPart
from email.mime.base import MIMEBase
from typing import Any, ClassVar, TypeVar

from django.conf import settings
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import DNS_NAME, EmailMessage, EmailMultiAlternatives, make_msgid
from django.core.mail.backends.base import BaseEmailBackend
from django.utils.encoding import force_str
from django.utils.module_loading import import_string

from ..bulk import enqueue_many
from ..core import serialization, unique_keys
from ..core.immediate_mail import is_immediate
from ..core.serialization import Json
from ..exceptions import InvalidMessage
from ..tasks import AnyTask, PreparedCall, task
from .usual_place import usual_place

# The text fields and the lists of a message.
_TEXTS = ("subject", "body", "from_email", "content_subtype", "encoding")
_LISTS = ("to", "cc", "bcc", "reply_to")
# What is no field of its own in the stored message, or belongs to the sending process.
_OTHERS = {"attachments", "alternatives", "extra_headers", "connection", "_connection"}

T = TypeVar("T")


@task(max_attempts=5, delete_on_success=False, **usual_place())
def send_message(message: dict[str, Any], by: dict[str, str]) -> int:
    """Send a message that ``EmailBackend`` has stored, and return the number of sent messages.

    It has up to five attempts. A process that dies while it sends may have sent the message, and it
    is sent again, with the same ``Message-ID``.
    """
    return _connection(by).send_messages([_message_of(message)]) or 0


class EmailBackend(BaseEmailBackend):
    """Enqueue each message as a job that sends it by another backend.

    The job is part of the caller's transaction, as every job. A subclass may set:

    task: the task, with other options: ``send_message.using(queue_name="mail")``.
    sent_by: the dotted path of the backend that sends, without ``MAILERS``; by default Django's for
        SMTP. With ``MAILERS``, its alias is the option ``mailer``.

    A message with the header ``Message-ID`` is enqueued once, however often it is sent; the others
    get one. Messages are enqueued all or none. Raises InvalidMessage for one that cannot be stored;
    with ``fail_silently``, it is left out.
    """

    task: ClassVar[AnyTask] = send_message
    sent_by: ClassVar[str] = "django.core.mail.backends.smtp.EmailBackend"

    def __init__(self, fail_silently: bool = False, *, mailer: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fail_silently = fail_silently
        self._by = self._sending_backend(mailer)

    def send_messages(self, email_messages: Sequence[EmailMessage]) -> int:
        """Enqueue the messages that have recipients, and return their number."""
        if is_immediate.get():
            return _connection(self._by).send_messages(email_messages) or 0
        calls = []
        for message in email_messages:
            if message.recipients():
                try:
                    calls.append(self._call(message))
                except InvalidMessage:
                    if not self.fail_silently:
                        raise
        enqueue_many(calls)
        return len(calls)

    def _call(self, message: EmailMessage) -> PreparedCall:
        stored, known = _stored(message)
        if len(known) > unique_keys.LONGEST:
            known = hashlib.sha256(known.encode()).hexdigest()
        task = self.task.using(key=known, on_conflict="once") if known else self.task
        return task.prepare(stored, self._by)

    def _sending_backend(self, mailer: str) -> dict[str, str]:
        """Return what a worker needs to find the backend that sends."""
        alias = getattr(self, "alias", None)
        if alias is None:
            _class_that_sends(type(self))
            return {"backend": _path(type(self))}
        if not mailer or mailer == alias or mailer not in mail.mailers:
            others = ", ".join(repr(each) for each in mail.mailers if each != alias) or "no other"
            raise ImproperlyConfigured(
                f"MAILERS[{alias!r}]['OPTIONS']['mailer'] is {mailer!r}. Give the alias of the "
                f"mailer that sends the messages: MAILERS has {others}."
            )
        return {"mailer": mailer}


def _connection(by: Mapping[str, str]) -> BaseEmailBackend:
    if mailer := by.get("mailer"):
        return mail.mailers[mailer]
    own = by["backend"]
    try:
        return _class_that_sends(_imported(own, EmailBackend))()
    except InvalidMessage:
        # Nothing is imported but what the settings name: the path comes from a row of a table.
        if own != settings.EMAIL_BACKEND:
            raise
        import_string(own)
        return _class_that_sends(_imported(own, EmailBackend))()


def _class_that_sends(own: type[EmailBackend]) -> type[BaseEmailBackend]:
    """Return the backend that ``sent_by`` names. Raises ImproperlyConfigured for anything else."""
    name, path = f"{_path(own)}.sent_by", own.sent_by
    try:
        found = import_string(path)
    except ImportError as error:
        raise ImproperlyConfigured(
            f"{name} is {path!r}, which cannot be imported: {error}"
        ) from None
    if not isinstance(found, type) or not issubclass(found, BaseEmailBackend):
        raise ImproperlyConfigured(f"{name} is {path!r}, which is no e-mail backend.")
    if issubclass(found, EmailBackend):
        raise ImproperlyConfigured(f"{name} is {path!r}, which enqueues messages, and sends none.")
    return found


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _imported(path: str, base: type[T]) -> type[T]:
    """Return an imported subclass of a class, or itself. Raises InvalidMessage for other paths."""
    found = [base]
    for each in found:
        if _path(each) == path:
            return each
        found += each.__subclasses__()
    raise InvalidMessage(
        f"{path!r} is no {base.__name__} that is imported here. Import its module in a module "
        "tasks."
    )


def _stored(message: EmailMessage) -> tuple[dict[str, Any], str]:
    """Return a message as JSON values, and its Message-ID; "" if it had none.

    Raises InvalidMessage.
    """
    # Pairs: some databases change the order of a JSON object.
    headers = [[name, force_str(value)] for name, value in message.extra_headers.items()]
    known = next((value for name, value in headers if name.lower() == "message-id"), "")
    if not known:
        headers.append(["Message-ID", make_msgid(domain=DNS_NAME)])
    values: dict[str, Any] = {"extra_headers": headers}
    for name in _TEXTS:
        value = getattr(message, name)
        values[name] = None if value is None else force_str(value)
    for name in _LISTS:
        values[name] = [force_str(each) for each in getattr(message, name)]
    values["attachments"] = [_stored_attachment(each) for each in message.attachments]
    values["alternatives"] = [
        [_stored_content(content), mimetype]
        for content, mimetype in getattr(message, "alternatives", [])
    ]
    values["class"] = _path(type(message))
    values["others"] = {
        name: _stored_value(name, value)
        for name, value in vars(message).items()
        if name not in _OTHERS and name not in values
    }
    values = {name: _stored_value(name, value) for name, value in values.items()}
    # Its headers are checked here, where the caller sees the error.
    message.message()
    return values, known


def _stored_value(name: str, value: object) -> Json:
    try:
        return serialization.to_json(value)
    except (TypeError, ValueError) as error:
        raise InvalidMessage(
            f"The message's attribute {name!r} cannot be stored in a job: {error} Send such a "
            "message by another backend."
        ) from None


def _stored_attachment(attachment: Any) -> dict[str, Json]:
    if isinstance(attachment, (MIMEPart, MIMEBase)):
        kind = "part" if isinstance(attachment, MIMEPart) else "base"
        return {"mime": kind, "content": _base64(attachment.as_bytes())}
    filename, content, mimetype = attachment
    if isinstance(content, EmailMessage):
        content = content.message().as_bytes()
    elif isinstance(content, email.message.Message):
        content = content.as_bytes()
    return {"filename": filename, "content": _stored_content(content), "mimetype": mimetype}


def _stored_content(content: object) -> Json:
    if isinstance(content, (bytes, bytearray, memoryview)):
        return {"base64": _base64(bytes(content))}
    return force_str(content)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _message_of(values: Mapping[str, Any]) -> EmailMessage:
    """Return the message. Raises InvalidMessage for values of no message."""
    message = _imported(values["class"], EmailMessage)()
    for name in (*_TEXTS, *_LISTS):
        if getattr(message, name) != values[name]:
            setattr(message, name, values[name])
    message.extra_headers = dict(values["extra_headers"])
    message.attachments = [_attachment_of(each) for each in values["attachments"]]
    if isinstance(message, EmailMultiAlternatives):
        message.alternatives = []
        for content, mimetype in values["alternatives"]:
            message.attach_alternative(_content_of(content), mimetype)
    vars(message).update(values["others"])
    return message


def _attachment_of(stored: Mapping[str, Any]) -> Any:
    if kind := stored.get("mime"):
        content = base64.b64decode(stored["content"])
        if kind == "part":
            return email.message_from_bytes(content, policy=email.policy.default)
        parsed = email.message_from_bytes(content)
        part = MIMEBase(parsed.get_content_maintype(), parsed.get_content_subtype())
        for name in part.keys():  # noqa: SIM118
            del part[name]
        for name, value in parsed.items():
            part[name] = value
        part.set_payload(parsed.get_payload())
        return part
    return _attachment(stored["filename"], _content_of(stored["content"]), stored["mimetype"])


def _attachment(filename: str | None, content: str | bytes, mimetype: str | None) -> Any:
    message = EmailMessage()
    message.attach(filename, content, mimetype)
    return message.attachments[0]


def _content_of(stored: Any) -> str | bytes:
    return base64.b64decode(stored["base64"]) if isinstance(stored, dict) else stored
