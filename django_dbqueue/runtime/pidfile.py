"""A file with the id of the running process, which keeps a second one from starting."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from contextlib import suppress

from .process_identity import lives


class PidfileTaken(Exception):
    """The file belongs to a process that lives."""


class InvalidPidfile(Exception):
    """The file cannot be written, or holds something else than a process id."""


class Pidfile:
    """Context manager that holds the file at ``path`` while its block runs.

    The file is locked: of two processes that start at once, one is refused. The lock ends with its
    process, so that a stale file is recognised even if another process has its id by now.

    Raises PidfileTaken or InvalidPidfile.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        try:
            self._file = self._open()
        except OSError as error:
            raise InvalidPidfile(
                f"The pidfile {self._path!r} cannot be written: {error.strerror}. Correct the path."
            ) from None
        os.truncate(self._file, 0)
        os.pwrite(self._file, self._content, 0)

    def __exit__(self, *exc_info: object) -> None:
        if self._is_current(self._file) and os.pread(self._file, 64, 0) == self._content:
            with suppress(OSError):
                os.unlink(self._path)
        os.close(self._file)

    @property
    def _content(self) -> bytes:
        return b"%d\n" % os.getpid()

    def _open(self) -> int:
        """Return the locked file, free for use."""
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(self._path, flags, 0o644)
            try:
                self._claim(file)
                # Its last owner may have removed it between the two calls.
                if self._is_current(file):
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _claim(self, file: int) -> None:
        status = os.fstat(file)
        content = os.pread(file, 64, 0).strip() if stat.S_ISREG(status.st_mode) else b"-"
        if not re.fullmatch(rb"\d*", content):
            raise InvalidPidfile(
                f"The pidfile {self._path!r} is not one: it holds something else than a process "
                "id. Choose another path."
            )
        pid = int(content or 0)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another program may have written it, without a lock.
            is_taken = 0 < pid != os.getpid() and lives(pid, status.st_mtime)
        except (BlockingIOError, PermissionError):
            is_taken = True
        if is_taken:
            raise PidfileTaken(
                f"The pidfile {self._path!r} belongs to the process {pid or 'of unknown id'}, "
                "which is alive. Stop it first, or choose another path."
            )

    def _is_current(self, file: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), os.stat(self._path, follow_symlinks=False))
        return False
