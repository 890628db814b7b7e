"""Tasks as a Django project with Celery has them. Not imported.

``test_celery_shim`` runs them by Celery as they are, and by ``django_dbqueue.contrib.celery`` with
other import lines.
"""

from celery import chain, chord, group, shared_task
from celery.exceptions import MaxRetriesExceededError
from celery.schedules import crontab
from django.core.mail import send_mail

calls = []

BEAT = {
    "clean up": crontab(minute=30, hour=3),
    "remind": crontab(hour="8-18/2", minute=[0, 30], day_of_week="mon-fri"),
    "invoice": crontab(0, 6, day_of_month="1,15"),
    "plan": crontab(0, 8, day_of_week="monday,Friday", month_of_year="march-april"),
}


class Busy(Exception):
    pass


class Unknown(Busy):
    pass


@shared_task(ignore_result=False, acks_late=True)
def welcome(email, language="en"):
    """Mail on sign-up."""
    calls.append("welcome")
    send_mail(f"Welcome ({language})", "Hello", "shop@example.com", [email])
    return email


@shared_task(name="shop.clean_up")
def clean_up(days=30):
    """The nightly clean-up."""
    return {"deleted": days}


@shared_task
def part(number):
    return number * 10


@shared_task
def report(parts, title):
    return f"{title}: {parts}"


@shared_task
def double(number):
    return number * 2


@shared_task(bind=True, max_retries=3, default_retry_delay=0)
def ask(self, succeeds_at):
    """A web API that is busy at first."""
    calls.append(self.request.retries)
    try:
        if self.request.retries < succeeds_at:
            raise Busy("come back later")
        return f"answer {self.request.retries} of {list(self.request.args)}"
    except Busy as error:
        raise self.retry(exc=error, countdown=0) from None


@shared_task(bind=True, default_retry_delay=0)
def ask_for_ever(self):
    calls.append(self.request.retries)
    self.retry(countdown=0)


@shared_task(bind=True, default_retry_delay=0)
def ask_twice(self):
    calls.append(self.request.retries)
    try:
        raise Busy("come back later")
    except Busy as error:
        self.retry(exc=error, max_retries=1)


@shared_task(bind=True, autoretry_for=(Busy,), default_retry_delay=0)
def ask_twice_of_four(self):
    calls.append(self.request.retries)
    try:
        raise Busy("come back later")
    except Busy as error:
        self.retry(exc=error, max_retries=1)


@shared_task(bind=True, default_retry_delay=0)
def tell_the_last(self):
    calls.append(self.request.retries)
    try:
        self.retry(countdown=0)
    except MaxRetriesExceededError:
        return "gave up"


@shared_task(
    autoretry_for=(Busy,),
    dont_autoretry_for=(Unknown,),
    retry_kwargs={"max_retries": 2},
    retry_backoff=True,
)
def sync(error):
    calls.append(error)
    if error:
        raise {"busy": Busy, "unknown": Unknown, "value": ValueError}[error]("no")
    return "synced"


def sign_up(email):
    return welcome.delay(email, language="fr")


def make_report():
    return chord([part.s(n) for n in (3, 1, 2)])(report.s("May"))


def count():
    return chain(part.s(2), double.s(), double.s()).delay()


def count_by_pipes():
    return (part.s() | double.s()).delay(4)


def count_beside():
    return group(part.s(n) for n in (5, 6)).delay()
