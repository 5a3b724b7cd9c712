"""The TLS certificate of the HTTP and gRPC servers, read and checked at the beginning of the start.
Must not know a listener."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from frame.core.errors import ConfigurationError

if TYPE_CHECKING:
    from frame.config.server_sections import ServerSection


@dataclass(frozen=True, slots=True)
class Certificate:
    """The PEM files of a certificate chain and its key."""

    chain: str
    key: str

    def context(self) -> ssl.SSLContext:
        """An SSL context for a server. Raises OSError or ValueError for an unusable pair."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # without this callback OpenSSL would ask for a passphrase on the terminal
        context.load_cert_chain(self.chain, self.key, password=_no_passphrase)
        return context

    def read_pems(self) -> tuple[bytes, bytes]:
        """(key, chain), in the order that gRPC takes."""
        return Path(self.key).read_bytes(), Path(self.chain).read_bytes()


def load_certificate(server: ServerSection) -> Certificate | None:
    """The configured certificate; None without TLS. Raises ConfigurationError."""
    chain, key = server.ssl_certfile, server.ssl_keyfile
    if chain is None:
        if key is not None:
            raise ConfigurationError("server.ssl_keyfile is set without server.ssl_certfile; give both, or neither")
        return None
    key = key or chain  # one file may hold both
    certificate = Certificate(chain, key)
    try:
        certificate.context()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigurationError(
            f"cannot serve TLS with server.ssl_certfile {chain} and server.ssl_keyfile {key} ({reason}); give a PEM chain and its key"
        ) from error
    return certificate


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase; store it without one")
