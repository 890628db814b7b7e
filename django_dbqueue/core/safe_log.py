"""The queue's own logger: a logging handler that raises fails neither a job nor a role."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial


class SafeLogger:
    """Logs by ``logging``, and suppresses the errors of handlers, filters and formatters.

    A handler may raise while its log server is unavailable. The line then goes to stderr.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self.isEnabledFor = self._logger.isEnabledFor
        # Not methods: each Python function between the caller and log() would need a stacklevel.
        self.debug = partial(self.log, logging.DEBUG)
        self.info = partial(self.log, logging.INFO)
        self.warning = partial(self.log, logging.WARNING)
        self.error = partial(self.log, logging.ERROR)
        self.exception = partial(self.log, logging.ERROR, exc_info=True)
        self.critical = partial(self.log, logging.CRITICAL)

    @property
    def level(self) -> int:
        return self._logger.level

    def log(
        self,
        level: int,
        message: str,
        *args: object,
        exc_info: bool | BaseException | None = None,
        extra: Mapping[str, object] | None = None,
        stacklevel: int = 1,
    ) -> None:
        try:
            self._logger.log(
                level, message, *args, exc_info=exc_info, extra=extra, stacklevel=stacklevel + 1
            )
        except Exception as error:
            with suppress(Exception):
                reason = f"{type(error).__qualname__}: {error}"
                sys.stderr.write(
                    f"{message % args if args else message}\n"
                    f"{self._logger.name}: a handler in LOGGING raised {reason}. Correct it, or "
                    "give it a QueueHandler, so that the line above is not lost.\n"
                )


logger = SafeLogger("django_dbqueue")
