"""The TLS certificate of the HTTP and gRPC servers and of the router, read and checked at the
beginning of the start. Must not know a listener."""

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
    """The PEM files of a certificate chain and its key. `client_ca`: of the authorities whose
    certificates clients must have; None: clients need none."""

    chain: str
    key: str
    client_ca: str | None = None

    def context(self) -> ssl.SSLContext:
        """An SSL context for a server. Raises OSError or ValueError for an unusable pair."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # without this callback OpenSSL would ask for a passphrase on the terminal
        context.load_cert_chain(self.chain, self.key, password=_no_passphrase)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.client_ca)
        return context

    def read_pems(self) -> tuple[bytes, bytes]:
        """(key, chain), in the order that gRPC takes."""
        return Path(self.key).read_bytes(), Path(self.chain).read_bytes()


def load_certificate(server: ServerSection) -> Certificate | None:
    """The configured certificate; None without TLS. Raises ConfigurationError."""
    return load_pair(server.ssl_certfile, server.ssl_keyfile, ("server.ssl_certfile", "server.ssl_keyfile"))


def load_pair(chain: str | None, key: str | None, names: tuple[str, str], client_ca: str | None = None) -> Certificate | None:
    """The certificate of these files; None without any. `names`: of their settings. Raises
    ConfigurationError."""
    if chain is None:
        if key is not None or client_ca is not None:
            name = names[1] if key is not None else "--ssl-ca-certs"
            raise ConfigurationError(f"{name} is set without {names[0]}; give both, or neither")
        return None
    key = key or chain  # one file may hold both
    certificate = Certificate(chain, key, client_ca)
    try:
        certificate.context()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigurationError(
            f"cannot serve TLS with {names[0]} {chain} and {names[1]} {key}{'' if client_ca is None else f' for clients of {client_ca}'}"
            f" ({reason}); give a PEM chain and its key"
        ) from error
    return certificate


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase; store it without one")
