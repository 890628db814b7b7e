"""Signals of the queue's processes, and of errors inside the queue.

``supervisor_*``, ``worker_*``, ``dispatcher_*`` and ``scheduler_*`` are sent in the process that
they are about, with ``sender=Process`` and ``process``, its row. The scheduler is a part of the
dispatcher.

``*_started``: the process is registered, and claims no job yet.
``*_stopping``: it claims no more jobs; running ones may end.
``*_stopped``: it is about to exit. Not sent by a process that is killed or crashes.

``worker_exited`` and ``dispatcher_exited`` are sent in the supervisor after a child of it has
ended in any way, with ``sender=Process``; ``process``, the supervisor's row; ``pid``; ``exitcode``,
negative for a signal, None for a thread that still runs; and ``reason``, such as ``"was killed by
signal 9"``.

``internal_error`` is sent for an error of the queue itself, as opposed to one of a task, with
``sender``, its class; ``exception``; and ``process``, the row of the operating system process, or
None if it is not registered. One is sent with each log line, thus not for each retry.

Receivers run on a thread of their own. An exception in a receiver is logged. A process waits for
its receivers for ten seconds at its start and for two seconds afterwards, and then continues
without them. Of ``*_exited`` and ``internal_error`` it waits for none.
"""

from django.dispatch import Signal

__all__ = [
    "dispatcher_exited",
    "dispatcher_started",
    "dispatcher_stopped",
    "dispatcher_stopping",
    "internal_error",
    "scheduler_started",
    "scheduler_stopped",
    "scheduler_stopping",
    "supervisor_started",
    "supervisor_stopped",
    "supervisor_stopping",
    "worker_exited",
    "worker_started",
    "worker_stopped",
    "worker_stopping",
]

supervisor_started, supervisor_stopping, supervisor_stopped = Signal(), Signal(), Signal()
worker_started, worker_stopping, worker_stopped, worker_exited = (Signal() for _ in range(4))
dispatcher_started, dispatcher_stopping, dispatcher_stopped = Signal(), Signal(), Signal()
scheduler_started, scheduler_stopping, scheduler_stopped = Signal(), Signal(), Signal()
dispatcher_exited = Signal()
internal_error = Signal()
