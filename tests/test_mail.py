"""``contrib.mail.EmailBackend``: messages are enqueued with all that they have, and sent by jobs."""

from __future__ import annotations

import warnings
from email.mime.base import MIMEBase
from email.mime.image import MIMEImage

import django
import pytest
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import EmailMessage, EmailMultiAlternatives
from django.core.mail.backends import locmem
from django.db import transaction
from django.utils.translation import gettext_lazy

from django_dbqueue.checks import check_recurring_tasks
from django_dbqueue.contrib.mail import EmailBackend, send_message
from django_dbqueue.exceptions import InvalidMessage
from django_dbqueue.models import Execution, Job
from django_dbqueue.testing import assert_enqueued, drain

pytestmark = [
    pytest.mark.django_db,
    # In favour of MAILERS, since Django 6.1.
    pytest.mark.filterwarnings("ignore:The EMAIL_BACKEND setting is deprecated"),
]

LOCMEM = "django.core.mail.backends.locmem.EmailBackend"
PNG = b"\x89PNG\r\n\x1a\n\x00\xff"


class Queued(EmailBackend):
    sent_by = LOCMEM
    task = send_message.using(queue_name="mail", priority=5)


class Refusing(locmem.EmailBackend):
    def send_messages(self, messages):
        raise ConnectionRefusedError("no server")


class RefusedLater(EmailBackend):
    sent_by = f"{__name__}.Refusing"


class Branded(EmailMultiAlternatives):
    """A message with data of its own, as those of mail services have."""

    def __init__(self, *args, brand="", **kwargs):
        super().__init__(*args, **kwargs)
        self.brand = brand


def a_message(cls=EmailMultiAlternatives, **values) -> EmailMessage:
    given = {"subject": "Hello", "body": "Text", "to": ["ada@example.com"], **values}
    return cls(**given)


def sent(message: EmailMessage, backend: type[EmailBackend] = Queued) -> EmailMessage:
    """Return the message as the sending backend gets it."""
    mail.outbox = []
    assert backend().send_messages([message]) == 1
    assert mail.outbox == []
    drain()
    assert list(Job.objects.values_list("state", flat=True)) == ["successful"]
    (found,) = mail.outbox
    return found


def comparable(message: EmailMessage) -> bytes:
    """Return the message as it is transferred, with the same boundaries."""
    written = message.message()
    for place, part in enumerate(written.walk()):
        if part.is_multipart():
            part.set_boundary(f"boundary-{place}")
    return written.as_bytes()


class TestMessage:
    @pytest.mark.parametrize(
        "message",
        [
            pytest.param(lambda: a_message(EmailMessage), id="plain"),
            pytest.param(lambda: a_message(body="Ünïcode ✓\n" + "x" * 2000), id="long lines"),
            pytest.param(
                lambda: a_message(
                    from_email="Bob <bob@example.com>",
                    cc=["c@example.com"],
                    bcc=["b@example.com"],
                    reply_to=["r@example.com"],
                    headers={"X-Order": "7", "List-Unsubscribe": "<mailto:x@example.com>"},
                ),
                id="headers",
            ),
            pytest.param(
                lambda: a_message(attachments=[("a.txt", "Text ✓", "text/plain")]), id="text"
            ),
            pytest.param(lambda: a_message(attachments=[("a.png", PNG, "image/png")]), id="bytes"),
            pytest.param(lambda: a_message(attachments=[("a", PNG, None)]), id="no type"),
            pytest.param(
                lambda: a_message(alternatives=[("<p>Text ✓</p>", "text/html")]), id="HTML"
            ),
            pytest.param(
                lambda: a_message(attachments=[("m.eml", a_message().message(), "message/rfc822")]),
                id="forwarded",
            ),
        ],
    )
    def test_it_arrives_as_it_was(self, message):
        given = message()
        given.extra_headers |= {
            "Message-ID": "<one@example.com>",
            "Date": "Mon, 01 Jan 2024 00:00:00 +0000",
        }

        found = sent(given)

        assert comparable(found) == comparable(given)
        assert found.recipients() == given.recipients()
        assert type(found) is type(given)

    def test_content_subtype_and_lazy_text_are_kept(self):
        given = a_message(EmailMessage, subject=gettext_lazy("Queue"), body="<p>Text</p>")
        given.content_subtype = "html"

        found = sent(given)

        assert found.subject == "Queue"
        assert found.message().get_content_type() == "text/html"

    def test_inline_image_is_kept(self):
        image = MIMEImage(PNG, "png")
        image["Content-ID"] = "<logo>"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Deprecated since Django 6.1.
            given = a_message(attachments=[image])

        (part,) = sent(given).attachments

        assert isinstance(part, MIMEBase)
        assert part["Content-ID"] == "<logo>"
        assert part.get_payload(decode=True) == PNG
        assert part.get_content_type() == "image/png"

    def test_attributes_of_other_classes_are_kept(self):
        found = sent(a_message(Branded, brand={"colour": "red"}))

        assert type(found) is Branded and found.brand == {"colour": "red"}

    def test_attribute_that_json_has_not_is_refused_with_its_name(self):
        backend, good = Queued(), a_message()
        with pytest.raises(InvalidMessage, match=r"'brand' cannot be stored in a job"):
            backend.send_messages([good, a_message(Branded, brand=object())])

        assert not Job.objects.exists()

    @pytest.mark.parametrize(
        ("values", "name"),
        [
            ({"body": "a\0b"}, "body"),
            ({"subject": "a\udcff"}, "subject"),
            ({"to": ["a\0@example.com"]}, "to"),
            ({"headers": {"X-Order": "a\0"}}, "extra_headers"),
            ({"alternatives": [("<p>\0</p>", "text/html")]}, "alternatives"),
        ],
    )
    def test_text_that_databases_refuse_is_refused_with_its_name(self, values, name):
        message = a_message(**values)
        with pytest.raises(InvalidMessage, match=rf"'{name}' cannot be stored in a job: Text with"):
            Queued().send_messages([a_message(), message])
        assert not Job.objects.exists()

        assert Queued(fail_silently=True).send_messages([a_message(), message]) == 1
        assert Job.objects.count() == 1

    def test_injected_header_is_refused_where_the_caller_sees_it(self):
        with pytest.raises(ValueError, match=r"(?i)header|newline|linefeed"):
            Queued().send_messages([a_message(subject="a\nBcc: spy@example.com")])

        assert not Job.objects.exists()

    def test_message_without_recipients_is_not_enqueued(self):
        assert Queued().send_messages([EmailMessage("Hello", "Text")]) == 0
        assert not Job.objects.exists()


class TestJob:
    def test_it_has_the_options_of_the_task(self):
        Queued().send_messages([a_message()])

        (job,) = assert_enqueued(send_message, queue="mail", times=1)
        assert (job.priority, job.max_attempts) == (5, 5)

    def test_message_of_a_transaction_that_is_rolled_back_is_not_sent(self):
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            Queued().send_messages([a_message()])
            raise ZeroDivisionError

        assert not Job.objects.exists()

    def test_failure_is_retried_with_the_same_id(self):
        RefusedLater().send_messages([a_message()])
        drain()

        job = Job.objects.get()
        assert job.state == "scheduled"
        assert Execution.objects.get().error_type == "builtins.ConnectionRefusedError"
        ((name, value),) = job.args[0]["extra_headers"]
        assert name == "Message-ID" and value.startswith("<")

    @pytest.mark.parametrize("name", ["Message-ID", "message-id"])
    @pytest.mark.parametrize("order", ["7", "7" * 500])
    def test_message_with_an_id_is_enqueued_once(self, name, order):
        for _ in range(2):
            Queued().send_messages([a_message(headers={name: f"<{order}@example.com>"})])
            drain()
        Queued().send_messages([a_message(headers={name: f"<{order}@another.example.com>"})])

        assert Job.objects.count() == 2

    def test_many_messages_are_enqueued_together(self, django_assert_max_num_queries):
        messages = [a_message(to=[f"{number}@example.com"]) for number in range(50)]
        messages += [a_message(headers={"Message-ID": "<one@example.com>"})] * 2
        with django_assert_max_num_queries(8):
            assert Queued().send_messages(messages) == 52

        assert Job.objects.count() == 51

    def test_messages_without_an_id_are_all_enqueued(self):
        message = a_message()
        Queued().send_messages([message, message])

        assert Job.objects.count() == 2


class TestSecurity:
    """A row inserted by hand must not import anything, nor make objects of any class."""

    @pytest.mark.parametrize("path", ["os.path", "tests.tasks.nothing", "subprocess.Popen", ""])
    def test_only_imported_classes_of_messages_are_made(self, path):
        Queued().send_messages([a_message()])
        job = Job.objects.get()
        job.args[0]["class"] = path
        job.save()
        drain()

        assert Execution.objects.get().error_type == "django_dbqueue.exceptions.InvalidMessage"

    @pytest.mark.parametrize("path", ["antigravity.x", LOCMEM, "subprocess.Popen"])
    def test_only_backends_that_enqueue_are_found(self, path):
        Queued().send_messages([a_message()])
        job = Job.objects.get()
        job.args[1]["backend"] = path
        job.save()
        drain()

        assert Execution.objects.get().error_type == "django_dbqueue.exceptions.InvalidMessage"


class TestSettings:
    @pytest.mark.parametrize(
        ("path", "why"),
        [
            ("nowhere.Backend", "cannot be imported"),
            ("tests.tasks.nothing", "is no e-mail backend"),
            (f"{__name__}.Queued", "enqueues messages, and sends none"),
        ],
    )
    def test_bad_sending_backend_is_named(self, path, why):
        own = type("Own", (EmailBackend,), {"sent_by": path})

        with pytest.raises(ImproperlyConfigured, match=f"Own.sent_by is '{path}'.*{why}"):
            own()

    @pytest.mark.skipif(django.VERSION >= (6, 1), reason="It is deprecated since Django 6.1.")
    def test_email_backend_of_the_settings(self, settings):
        settings.EMAIL_BACKEND = f"{__name__}.Queued"
        mail.outbox = []

        assert mail.send_mail("Hello", "Text", None, ["ada@example.com"]) == 1
        drain()

        assert [each.subject for each in mail.outbox] == ["Hello"]

    @pytest.mark.skipif(django.VERSION < (6, 1), reason="MAILERS is new in Django 6.1.")
    class TestMailers:
        def test_other_mailer_sends(self, settings):
            settings.MAILERS = {
                "default": {"BACKEND": f"{__name__}.Queued", "OPTIONS": {"mailer": "smtp"}},
                "smtp": {"BACKEND": LOCMEM},
            }
            mail.outbox = []

            assert "dbqueue.E014" not in [each.id for each in check_recurring_tasks()]
            assert mail.send_mail("Hello", "Text", None, ["ada@example.com"]) == 1
            drain()

            assert [each.sent_using for each in mail.outbox] == ["smtp"]

        @pytest.mark.parametrize("options", [{}, {"mailer": "default"}, {"mailer": "stmp"}])
        def test_bad_mailer_is_named(self, settings, options):
            settings.MAILERS = {
                "default": {"BACKEND": f"{__name__}.Queued", "OPTIONS": options},
                "smtp": {"BACKEND": LOCMEM},
            }

            (found,) = [each for each in check_recurring_tasks() if each.id == "dbqueue.E014"]
            assert "['mailer'] is " in found.msg
            with pytest.raises(ImproperlyConfigured, match=r"\['mailer'\] is .*MAILERS has 'smtp'"):
                mail.send_mail("Hello", "Text", None, ["ada@example.com"])
