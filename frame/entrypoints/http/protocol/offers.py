"""`PlainProtocol`: uvicorn's HTTP connection, which stays HTTP/1.1 when a client offers to change
to another protocol.

Java's HttpClient and `curl --http2` offer HTTP/2 with each first request, body and all. The parser
reads nothing behind such an offer, as if it had been taken up; so the request is read again without
it. Knows no route.
"""

from __future__ import annotations

import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)


class PlainProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._is_offer = False  # the head at hand offers another protocol; nobody is told of it

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                if self._is_offer:
                    data = self._without_offer() + data[stopped.args[0] :]
                    continue
                self.send_400_response("")
            except httptools.HttpParserError as error:
                log.debug("no HTTP: %s", error)
                self.send_400_response("")
            return

    def on_message_begin(self) -> None:
        self._is_offer = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_offer = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        if not self._is_offer:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._is_offer:
            super().on_message_complete()

    def _without_offer(self) -> bytes:
        """The head at hand in bytes again, for a parser that has not seen it."""
        old, self.parser = self.parser, httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        version = old.get_http_version().encode("ascii")
        fields = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([old.get_method() + b" " + self.url + b" HTTP/" + version, *fields, b"\r\n"])
