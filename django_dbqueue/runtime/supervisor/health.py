"""Health of ``runqueue`` over HTTP, for Kubernetes and load balancers: ``/live`` and ``/ready``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .supervisor import Supervisor

# Seconds for which a client may keep its connection without a request.
PATIENCE = 5.0


def serve(address: str, port: int, supervisors: Sequence[Supervisor]) -> None:
    """Answer on a thread of this process: 200 if all is well, 503 with the reasons if not.

    ``/live``: the main loops make progress, so a restart would help nothing. ``/ready``: the
    database answers, and all workers and dispatchers have started. Raises OSError if the port
    cannot be used.
    """
    answers: Mapping[str, Callable[[Supervisor], list[str]]] = {
        "/live": Supervisor.why_not_live,
        "/ready": Supervisor.why_not_ready,
    }

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE

        def do_GET(self) -> None:
            find = answers.get(self.path.partition("?")[0].rstrip("/"))
            if find is None:
                self._answer(404, [f"Ask for {' or '.join(answers)}."])
                return
            reasons = [f"{each.alias}: {why}" for each in supervisors for why in find(each)]
            self._answer(503 if reasons else 200, reasons or ["ok"])

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a probe asks every few seconds."""

        def _answer(self, status: int, lines: list[str]) -> None:
            body = "".join(f"{line}\n" for line in lines).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer((address, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
