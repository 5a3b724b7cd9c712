"""Hosts without the secret of the launcher `rendezvous` do not keep out one that has it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from frame.host.authenticated_link import LinkError, authenticate
from frame.interfaces.launcher import LauncherContext
from frame.plugins.launchers.rendezvous import RendezvousLauncher
from tests.entrypoints.serving import free_port

SECRET = b"a" * 16
CONNECTIONS = 200
HOSTS = 5  # that connect one after another
ATTEMPTS = 3  # a host tries again every half second


async def connect_host(launcher: RendezvousLauncher) -> None:
    """Connect and prove the secret."""
    for _ in range(ATTEMPTS):
        try:
            link = await authenticate(*await asyncio.open_connection(launcher.host, launcher.port), SECRET, is_listener=False)
        except LinkError:
            continue
        link.close()
        return
    raise AssertionError(f"a host with the secret is kept out in {ATTEMPTS} attempts")


@pytest.mark.parametrize("how", ["idle", "trickle", "half", "large", "wrong"])
def test_unknown_hosts_do_not_keep_a_host_out(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launcher = RendezvousLauncher(LauncherContext(2, tmp_path, 2, 0, f"127.0.0.1:{free_port()}"), key=SECRET)
    launcher._listen()
    program = str(Path(__file__).with_name("rendezvous_unknown_hosts.py"))
    command = [sys.executable, program, launcher.host, str(launcher.port), how, str(CONNECTIONS)]
    attackers = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert attackers.stdout is not None
        assert attackers.stdout.readline() == b"connected\n"
        for _ in range(HOSTS):
            asyncio.run(connect_host(launcher))
    finally:
        attackers.communicate(b"", timeout=30)
        launcher.close()
    assert len(caplog.records) < 40, "unknown hosts fill the log"
