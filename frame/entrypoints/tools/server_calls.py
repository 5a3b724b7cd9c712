"""Calls of a server by commands, and what they print about its errors. Used by the commands that
take `--base-url`."""

from __future__ import annotations

import json
from typing import Any

import click

# Control characters are shown: a terminal acts on them, and some write its clipboard (OSC 52).
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | dict.fromkeys(range(127, 160), 0xFFFD)


def describe_unreachable(base_url: str, error: Exception) -> str:
    """The error message for a server that does not respond."""
    if "://" not in base_url:
        return f"--base-url {base_url} has no scheme; write http://{base_url}."
    return f"The server at {base_url} does not respond ({error}); start one with `frame serve`, or pass its URL with --base-url."


def make_headers(key: str | None) -> dict[str, str]:
    """The headers of a request with this API key. Raises ClickException for one that no header can
    hold."""
    if key and not (key.isascii() and key.isprintable()):
        raise click.ClickException("The API key has characters that are not printable ASCII, which no header can hold; check --api-key.")
    return {"authorization": f"Bearer {key}"} if key else {}


def ask_server(method: str, base_url: str, path: str, key: str | None, body: Any = None, timeout: float | None = None) -> Any:
    """The JSON of a response. Raises ClickException where there is none."""
    import httpx

    headers = make_headers(key)
    try:
        reply = httpx.request(method, base_url.rstrip("/") + path, json=body, headers=headers, timeout=timeout)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise click.ClickException(describe_unreachable(base_url, error)) from None
    if reply.status_code != 200:
        raise click.ClickException(f"{base_url}{path} answered {reply.status_code}: {read_error_message(reply.text)}")
    try:
        return reply.json()
    except ValueError:
        raise click.ClickException(f"{base_url}{path} answered with what is not JSON; is it a server of frame?") from None


def read_error_message(text: str) -> str:
    """The error message in the body of an error response."""
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = text[:200]
    return message.translate(CONTROLS)
