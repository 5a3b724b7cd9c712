"""For all tests: child processes import from this checkout, clients of httpx share the default TLS
context, and garbage collections skip what the collection of tests has made.

httpx reads the certificates of all authorities for each client and each call without one, 25 ms of
CPU every time; the tests make thousands, to servers without TLS.
"""

from __future__ import annotations

import functools
import gc
import os
import ssl
from pathlib import Path
from typing import Any

import httpx._transports.default as transports

# Processes of frame do not import from the working folder, and some run a module of the tests.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))

_create: Any = vars(transports)["create_ssl_context"]


@functools.cache
def _default_context(file: str | None, folder: str | None) -> ssl.SSLContext:
    """The default of these values of SSL_CERT_FILE and SSL_CERT_DIR, which httpx reads itself."""
    context: ssl.SSLContext = _create()
    return context


def _create_once(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is True and cert is None and trust_env:
        return _default_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    context: ssl.SSLContext = _create(verify, cert, trust_env)
    return context


vars(transports)["create_ssl_context"] = _create_once


gc.disable()  # till the tests are collected: what imports make stays alive, and was traversed for a fifth of their time


def pytest_collection_finish() -> None:
    """The modules of tests and libraries stay alive: a collection, which each capture of graphs
    begins with, would traverse their objects every time."""
    gc.collect()
    gc.freeze()
    gc.enable()
