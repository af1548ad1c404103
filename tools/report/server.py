"""Serves the page of a store to this machine's user alone."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import parse_qs

from opgrip.cli.command import printable
from opgrip.errors import UserError

LOOPBACK = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageServer(ThreadingHTTPServer):
    """Gives a page, made anew at each request, to who has the token.

    Parameters
    ----------
    make : the page's HTML
    port : 0 for any that is free

    Attributes
    ----------
    address : what a browser is to open
    """

    daemon_threads = True

    def __init__(self, make: Callable[[], str], port: int = 0) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.make, self.making, self.token = make, Lock(), secrets.token_urlsafe(24)
        self.hosts = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}
        self.address = f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of who went away before the answer came; of all else, as usual."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "opgrip", ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer a browser."""
        path, _, query = self.path.partition("?")
        token = parse_qs(query).get("token", [""])[0]
        # a page of others that names this machine by a host of its own has no token, and is told so before it is asked
        if self.headers.get("Host") not in self.server.hosts or not compare_digest(
            token.encode(), self.server.token.encode()
        ):
            self._answer(HTTPStatus.FORBIDDEN, "open the address that opgrip view printed\n", "text/plain")
        elif path != "/":
            self._answer(HTTPStatus.NOT_FOUND, "there is one page, at /\n", "text/plain")
        else:
            self._answer_page()

    def _answer_page(self) -> None:
        try:
            # a browser asks for it twice at once, and it takes seconds
            with self.server.making:
                page = self.server.make()
        except UserError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{printable(error)}\n", "text/plain")
        else:
            self._answer(HTTPStatus.OK, page, "text/html")

    def log_message(self, *_: object) -> None:
        """Print nothing: the token would stand in it."""

    def _answer(self, status: HTTPStatus, text: str, kind: str) -> None:
        content = text.encode(errors="backslashreplace")
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
