"""Middleware that lets ``OPTIONS["note_source"]`` record requests and their users."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from .core.source import request_noted


@sync_and_async_middleware
def source_middleware(
    get_response: Callable[[HttpRequest], Any],
) -> Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]:
    """Note each request with the jobs that it enqueues: its path, and its user.

    It serves WSGI and ASGI, and belongs at the top of ``MIDDLEWARE``. Without it, a job's source
    is the process alone.
    """
    if iscoroutinefunction(get_response):

        async def anote(request: HttpRequest) -> HttpResponseBase:
            with request_noted(request):
                return await get_response(request)  # type: ignore[no-any-return]

        return anote

    def note(request: HttpRequest) -> HttpResponseBase:
        with request_noted(request):
            return get_response(request)  # type: ignore[no-any-return]

    return note
