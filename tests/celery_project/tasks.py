"""Tasks as a Django project with Celery has them.

``test_celery_shim`` copies this folder. It runs one copy by Celery as it is, and the other by
``django_dbqueue.contrib.celery`` with other import lines.
"""

from celery import chain, chord, group, shared_task
from celery.exceptions import MaxRetriesExceededError, SoftTimeLimitExceeded
from celery.utils.log import get_task_logger
from django.core.mail import send_mail

logger = get_task_logger(__name__)
calls = []


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


@shared_task(rate_limit="100/m")
def remind(email):
    send_mail("Reminder", "You have not been here for a while.", "shop@example.com", [email])


@shared_task
def invoice():
    logger.info("invoices are sent")
    return "invoiced"


@shared_task()
def confirm(number):
    """Mail after the order is committed."""
    send_mail(f"Order {number}", "Thank you.", "shop@example.com", ["ada@example.com"])


@shared_task(
    bind=True,
    autoretry_for=(ConnectionError,),
    retry_backoff=2,
    retry_backoff_max=60,
    retry_jitter=False,
    max_retries=5,
    acks_late=True,
    soft_time_limit=20,
    time_limit=30,
)
def pay(self, number):
    """A bank that does not answer twice."""
    calls.append(f"pay {number}")
    try:
        if self.request.retries < 2:
            raise ConnectionError("no answer")
    except SoftTimeLimitExceeded:
        logger.warning("%s takes too long", self.name)
        raise
    return f"{number} is paid"


@shared_task
def weigh(number):
    return number * 100


@shared_task
def label(grams):
    return f"{grams} g"


@shared_task
def ship(labels, number):
    return f"{number}: {', '.join(labels)}"


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


def pack(number):
    """Weigh two parcels of an order at a time, and ship them together."""
    parcels = [weigh.s(number), weigh.s(number + 1)]
    return chord([each | label.s() for each in parcels])(ship.s(number))


def pay_tomorrow(number, time):
    return pay.apply_async((number,), eta=time, priority=3, queue="default", retry=False)


def confirm_in_time(number):
    return confirm.apply_async(kwargs={"number": number}, countdown=60, expires=600, time_limit=25)
