"""`scripts/rolling_upgrade.py` with servers that answer as told, each a process that commands start
and stop: at every moment enough of them serve, and a new version that is broken changes nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.rolling_upgrade import main
from tests.entrypoints.serving import free_port, free_ports, wait_until

SERVER = """
import http.server, json, signal, sys, threading, time
port, version = int(sys.argv[1]), sys.argv[2]
def note(event):
    with open(__file__ + ".events", "a") as file: file.write(f"{time.monotonic()} {port} {version} {event}\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_ok = self.path != "/health_generate" or version != "broken"
        if version == "other" and self.path == "/v1/models": body = {"data": [{"id": "another"}]}
        else: body = {"data": [{"id": "m"}], "version": version}
        data = json.dumps(body).encode()
        self.send_response(200 if is_ok else 503)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        if self.path == "/health_generate": note("generated")
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
server.daemon_threads = False  # a response that began is sent whole
def stop(*_):
    note("stopped")
    threading.Thread(target=server.shutdown).start()
signal.signal(signal.SIGTERM, stop)
server.serve_forever()
"""
START = """
import subprocess, sys
done = subprocess.Popen([sys.executable, sys.argv[1] + "/server.py", sys.argv[2], sys.argv[3]], start_new_session=True)
open(f"{sys.argv[1]}/{sys.argv[2]}.pid", "w").write(str(done.pid))
"""
STOP = """
import os, signal, sys
os.kill(int(open(f"{sys.argv[1]}/{sys.argv[2]}.pid").read()), signal.SIGTERM)
"""


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in (("server", SERVER), ("start", START), ("stop", STOP)):
            (folder / f"{name}.py").write_text(text)
        self.ports = free_ports(3)
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        for port in self.ports[:2]:
            subprocess.run([sys.executable, folder / "start.py", folder, str(port), "old"], check=True)
        wait_until(lambda: len(self.versions()) == 2, 60)

    def versions(self) -> dict[int, str]:
        """By port, of those that answer."""
        found = {}
        for port, url in zip(self.ports, self.urls, strict=True):
            try:
                with urllib.request.urlopen(url + "/x", timeout=60) as reply:
                    found[port] = reply.read().decode().rpartition('version": "')[2].rstrip('"}')
            except OSError:
                pass
        return found

    def list_events(self) -> list[list[str]]:
        """(port, version, what) in the order of their times."""
        lines = (self.folder / "server.py.events").read_text().splitlines()
        return [line.split()[1:] for line in sorted(lines, key=lambda line: float(line.split()[0]))]

    def upgrade(self, version: str, *more: str) -> None:
        command = f"{sys.executable} {self.folder}/"
        replicas = [word for url in self.urls[:2] for word in ("--replica", url)]
        commands = ("--start", f"{command}start.py {self.folder} {{port}} {version}", "--stop", f"{command}stop.py {self.folder} {{port}}")
        main([*replicas, "--spare", self.urls[2], *commands, "--start-timeout", "120", "--drain-timeout", "120", *more])


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    for path in tmp_path.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def test_all_are_replaced_and_two_always_serve(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.upgrade("new")
    assert fleet.versions() == {fleet.ports[0]: "new", fleet.ports[2]: "new"}
    first, second, spare = map(str, fleet.ports)
    assert fleet.list_events() == [  # a new one has generated before an old one is told to stop
        [spare, "new", "generated"],
        [first, "old", "stopped"],
        [first, "new", "generated"],
        [second, "old", "stopped"],
    ]
    assert "2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "sentence"), [("broken", "is ready, but generates nothing"), ("other", "serves ['another'], and the old ones ['m']")]
)
def test_a_broken_version_changes_nothing(fleet: Fleet, version: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        fleet.upgrade(version)
    error = capsys.readouterr().err
    assert sentence in error and "it is stopped, and http" in error
    wait_until(lambda: fleet.versions() == dict.fromkeys(fleet.ports[:2], "old"), 60)


def test_what_is_refused_before_anything_changes(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = f"http://127.0.0.1:{free_port()}"
    for arguments, sentence in (
        (["--replica", unknown], f"the replica {unknown} is not ready; nothing was changed"),
        (["--spare", fleet.urls[0]], "an address is given twice"),
        (["--spare", "127.0.0.1:1"], "127.0.0.1:1 is no address"),
        (["--spare", "http://a:x"], "http://a:x is no address"),
        (["--start", "/no/such/command {port}"], "/no/such/command cannot be run"),
        (["--start", "false"], "false ended with code 1"),
    ):
        with pytest.raises(SystemExit):
            fleet.upgrade("new", *arguments)
        assert sentence in capsys.readouterr().err
    assert fleet.versions() == dict.fromkeys(fleet.ports[:2], "old")
