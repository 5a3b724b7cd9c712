"""Upgrades servers behind a router one after another, without Kubernetes: starts a new server at a
spare address, warms it, drains an old one, whose address is the next spare one.

    python scripts/rolling_upgrade.py --spare http://127.0.0.1:30003 \\
        --replica http://127.0.0.1:30001 --replica http://127.0.0.1:30002 \\
        --start "systemctl start frame@{port}" --stop "systemctl stop frame@{port}"

The router lists the replicas and the spare address. `--start` starts the new version and returns;
`--stop` sends SIGTERM. Needs Python only.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

POLL = 0.2  # seconds


class UpgradeError(Exception):
    """Why the upgrade ends; the message is for the operator."""


def ask(url: str, path: str, timeout: float = 5.0) -> Any:
    """The JSON of a route; None where the server does not answer with 200."""
    request = urllib.request.Request(url + path)
    if key := os.environ.get("FRAME_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return json.loads(reply.read() or b"{}")
    except (OSError, ValueError):
        return None


def is_gone(url: str) -> bool:
    """Whether nothing accepts connections there."""
    try:
        urllib.request.urlopen(url + "/health/live", timeout=5).close()
    except urllib.error.HTTPError:
        return False
    except urllib.error.URLError as error:
        return isinstance(error.reason, ConnectionRefusedError)
    except OSError:
        return False
    return False


def run(template: str, url: str) -> None:
    """Run a command for the server at an address."""
    command = shlex.split(template.replace("{port}", str(urlsplit(url).port)))
    try:
        code = subprocess.run(command, check=False).returncode
    except OSError as error:
        raise UpgradeError(f"{command[0]} cannot be run ({error.strerror})") from None
    if code:
        raise UpgradeError(f"{shlex.join(command)} ended with code {code}")


def models(url: str) -> list[str]:
    return sorted(model["id"] for model in (ask(url, "/v1/models") or {}).get("data", ()))


def start_new(url: str, start: str, expected: list[str], timeout: float) -> None:
    """Start a server and wait until it has generated a token. Raises UpgradeError."""
    run(start, url)
    deadline = time.monotonic() + timeout
    while ask(url, "/health/ready") is None:
        if time.monotonic() > deadline:
            raise UpgradeError(f"the new server at {url} is not ready after {timeout:.0f} s")
        time.sleep(POLL)
    if ask(url, "/health_generate", timeout=60.0) is None:
        raise UpgradeError(f"the new server at {url} is ready, but generates nothing; see its log")
    if (found := models(url)) != expected:
        raise UpgradeError(f"the new server at {url} serves {found}, and the old ones {expected}")


def drain_old(url: str, stop: str, timeout: float) -> None:
    """Stop a server and wait until it has finished its requests. Raises UpgradeError."""
    run(stop, url)
    deadline = time.monotonic() + timeout
    while not is_gone(url):
        if time.monotonic() > deadline:
            raise UpgradeError(f"the old server at {url} still runs after {timeout:.0f} s; stop it, and start again with the others")
        time.sleep(POLL)


def upgrade(replicas: Sequence[str], spare: str, start: str, stop: str, start_timeout: float, drain_timeout: float) -> None:
    """Upgrade all replicas. Until a new server is warm, its predecessor serves. Raises
    UpgradeError."""
    for url in replicas:
        if ask(url, "/health/ready") is None:
            raise UpgradeError(f"the replica {url} is not ready; nothing was changed")
    if not is_gone(spare):
        raise UpgradeError(f"something answers at the spare address {spare}; nothing was changed")
    expected = models(replicas[0])
    for number, old in enumerate(replicas, 1):
        began = time.monotonic()
        try:
            start_new(spare, start, expected, start_timeout)
        except UpgradeError as error:
            if not is_gone(spare):
                run(stop, spare)
            raise UpgradeError(f"{error}; it is stopped, and {old} serves on") from None
        drain_old(old, stop, drain_timeout)
        print(f"{number} of {len(replicas)}: {spare} has taken the place of {old} after {time.monotonic() - began:.0f} s", flush=True)
        spare = old


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replica", action="append", required=True, metavar="URL", help="an old server, as http://HOST:PORT; repeat it")
    parser.add_argument("--spare", required=True, metavar="URL", help="an address of the router's list where nothing runs")
    parser.add_argument("--start", required=True, metavar="COMMAND", help="starts the new version; {port} is the port")
    parser.add_argument("--stop", required=True, metavar="COMMAND", help="sends SIGTERM to a server; {port} is its port")
    parser.add_argument("--start-timeout", type=float, default=1800.0, metavar="SECONDS")
    parser.add_argument("--drain-timeout", type=float, default=120.0, metavar="SECONDS", help="more than server.drain_timeout")
    options = parser.parse_args(arguments)
    urls = [url.rstrip("/") for url in (*options.replica, options.spare)]
    for url in urls:
        try:
            is_valid = urlsplit(url).scheme in ("http", "https") and urlsplit(url).port is not None
        except ValueError:
            is_valid = False
        if not is_valid:
            parser.error(f"{url} is no address; write http://HOST:PORT")
    if len({*urls}) < len(urls):
        parser.error("an address is given twice")
    try:
        upgrade(urls[:-1], urls[-1], options.start, options.stop, options.start_timeout, options.drain_timeout)
    except UpgradeError as error:
        fail(str(error))


def fail(sentence: str) -> NoReturn:
    print(f"rolling_upgrade: {sentence}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
