"""`UpgradeRefusingProtocol`: uvicorn's HTTP connection, which stays HTTP/1.1 when a request has an
`Upgrade` header.

Java's HttpClient and `curl --http2` send `Upgrade: h2c` with a first request that has a body. The
parser stops after the head of such a request, so the head is parsed again without the header. Must
not depend on a route.
"""

from __future__ import annotations

import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)


class UpgradeRefusingProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._has_upgrade = False  # the current head asks for another protocol; uvicorn does not see it

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                if self._has_upgrade:
                    data = self._head_without_upgrade() + data[stopped.args[0] :]
                    continue
                self.send_400_response("")
            except httptools.HttpParserError as error:
                log.debug("invalid HTTP: %s", error)
                self.send_400_response("")
            return

    def on_message_begin(self) -> None:
        self._has_upgrade = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._has_upgrade = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        if not self._has_upgrade:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._has_upgrade:
            super().on_message_complete()

    def _head_without_upgrade(self) -> bytes:
        """The bytes of the current head without `Upgrade`, for a new parser."""
        old, self.parser = self.parser, httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        version = old.get_http_version().encode("ascii")
        fields = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([old.get_method() + b" " + self.url + b" HTTP/" + version, *fields, b"\r\n"])
