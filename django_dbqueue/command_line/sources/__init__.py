"""The queues whose jobs and schedules ``manage.py queue import`` moves here."""

from .dj_queue import DjQueue
from .django_celery_beat import DjangoCeleryBeat
from .django_ox import DjangoOx
from .django_q2 import DjangoQ2
from .django_tasks_db import DjangoTasksDb
from .procrastinate import Procrastinate
from .source import Source
from .steady_queue import SteadyQueue

SOURCES: dict[str, type[Source]] = {
    each.name: each
    for each in (
        DjangoTasksDb,
        DjangoQ2,
        Procrastinate,
        DjQueue,
        SteadyQueue,
        DjangoOx,
        DjangoCeleryBeat,
    )
}
