from celery.result import AsyncResult
from django.db import transaction
from django.http import JsonResponse

from . import tasks


@transaction.atomic
def order(request, number):
    """Place an order: mail after the commit, the payment soon, and the parcel meanwhile."""
    tasks.confirm.delay_on_commit(number)
    paid = tasks.pay.apply_async((number,), countdown=10, expires=3600, priority=7)
    packed = tasks.pack(number)
    return JsonResponse({"paid": paid.id, "packed": packed.id}, status=202)


def state(request, task_id):
    """Tell the page that polls how far a task is."""
    result = AsyncResult(task_id)
    answer = {"state": result.state, "ready": result.ready()}
    if result.successful():
        answer["result"] = result.get(timeout=1)
    return JsonResponse(answer)
