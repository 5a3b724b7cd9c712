"""`Reload`: what SIGHUP renews while the server runs: API keys, the TLS certificate, and the level
of the log.

The server gives it the parts that use them. Everything is read and checked before anything is
changed. Must not know a signal or a route.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from frame.config.schema import FrameConfig, LogSection, ServerSection
from frame.core.errors import ConfigurationError
from frame.entrypoints import logs
from frame.entrypoints.keys import KeyRing, load_keys
from frame.entrypoints.tls import Certificate, load_certificate

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Reload:
    """`read_config` reads the configuration's sources again; of it, only the section `log` is used.
    The files of keys and certificates are those of `server`, the running configuration."""

    server: ServerSection
    read_config: Callable[[], FrameConfig]
    tell_children: Callable[[LogSection], None]
    rings: list[KeyRing] = field(default_factory=list)
    on_certificate: list[Callable[[Certificate], None]] = field(default_factory=list)

    async def run(self) -> None:
        """Renew all of it, or, when something cannot be read, nothing; the log says which."""
        try:
            settings, keys, certificate = await asyncio.to_thread(self._read)
        except ConfigurationError as error:
            log.error("SIGHUP: nothing is reloaded, and what was read before stays in use: %s", error)
            return
        done = [f"log level {settings.level}"]
        logs.set_levels(settings)
        self.tell_children(settings)
        if keys is not None and self.rings:
            for ring in self.rings:
                ring.replace_keys(keys)
            done.append(f"{len(keys)} API keys")
        if certificate is not None:
            for renew in self.on_certificate:
                renew(certificate)
            done.append("the certificate")
        logs.report(f"SIGHUP: reloaded {', '.join(done)}")

    def _read(self) -> tuple[LogSection, KeyRing | None, Certificate | None]:
        return self.read_config().log, load_keys(self.server), load_certificate(self.server)
