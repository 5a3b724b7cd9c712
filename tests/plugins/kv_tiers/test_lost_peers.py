"""The tier `nixl` of a decode server whose prefill server is a process that is killed or stopped,
with the real library."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from frame.core.interfaces.kv_tier import KVTierResult, KVTransfer
from frame.host import authenticated_link
from frame.testing.kv_tier.rig import make_block
from tests.entrypoints.serving import free_port, wait_until

pytest.importorskip("nixl_cu13")

from frame.plugins.kv_tiers import nixl
from frame.plugins.kv_tiers.link_thread import ACQUIRE
from frame.plugins.kv_tiers.nixl_agent import NixlAgent, UnfinishedReadError
from frame.plugins.kv_tiers.peer_links import PeerLinks
from tests.plugins.kv_tiers.prefill_peers import BLOCK_BYTES, KEYS, LEASES, NUM_BLOCKS, PrefillPeers, open_tier

PATIENCE = 30.0


class Decode:
    """A decode server's tier, driven as its engine does."""

    def __init__(self, port: int) -> None:
        self.tier, self._port, self._job = open_tier("decode", port), port, 0
        self.buffers: Sequence[torch.Tensor] = ()  # of the last load
        wait_until(lambda: self.tier._pool.num_free == NUM_BLOCKS, PATIENCE)

    def load(self, lease: str) -> KVTierResult:
        self._job += 1
        self.tier.open_transfer(KVTransfer(lease, "127.0.0.1", self._port, len(KEYS)), KEYS)
        buffers = self.tier.load(self._job, KEYS)
        assert buffers is not None
        self.buffers = buffers
        results: list[KVTierResult] = []
        wait_until(lambda: bool(results.extend(self.tier.poll()) or results), PATIENCE)
        (result,) = results
        for key, buffer in zip(KEYS[: result.num_blocks], buffers, strict=False):
            assert np.array_equal(buffer.numpy(), make_block(key, BLOCK_BYTES))
        self.tier.finish(self._job)
        self.tier.close_transfer(lease)
        return result

    @property
    def links(self) -> PeerLinks:
        assert self.tier._links is not None
        return self.tier._links

    def count_free(self) -> int:
        assert self.tier.poll() == []
        return self.tier._pool.num_free


@pytest.fixture(scope="module")
def peers() -> Iterator[PrefillPeers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")  # a stopped process serves no reads by it, as over a network
        with PrefillPeers(free_port()) as opened:
            yield opened


@pytest.fixture
def decode(peers: PrefillPeers) -> Iterator[Decode]:
    server = Decode(peers.port)
    yield server
    server.tier.close()


@pytest.mark.slow
def test_nothing_of_killed_prefill_servers_is_left(decode: Decode, peers: PrefillPeers) -> None:
    """Neither at NIXL nor in the process: maps of shared memory, descriptors, resident memory."""
    process, sizes, names = psutil.Process(), list[tuple[int, int]](), list[str]()
    resident: list[int] = []
    for _ in range(3):
        pid = peers.start()
        assert decode.load("one").num_blocks == len(KEYS)
        (peer,) = (task.result() for task in decode.links._peers.values())
        names.append(peer.agent)
        peers.kill(pid)
        wait_until(lambda: not decode.links._peers, PATIENCE)
        wait_until(lambda: not any(decode.tier._agent._agent.check_remote_metadata(name) for name in names), PATIENCE)
        shared = sum(" rw-s " in line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
        sizes.append((shared, process.num_fds()))
        resident.append(process.memory_info().rss)
    assert len(set(names)) == 3
    assert sizes[2][0] == sizes[0][0]
    assert sizes[2][1] <= sizes[0][1] + 1  # a descriptor may be closed a little later
    assert resident[2] - resident[0] < 2 * len(KEYS) * BLOCK_BYTES


@pytest.mark.slow
def test_a_reply_of_a_server_that_is_gone_leaves_nothing_at_nixl(
    decode: Decode, peers: PrefillPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, added = PeerLinks._ask, list[str]()

    async def ask_and_lose(self: PeerLinks, peer: Any, kind: int, content: bytes) -> bytes:
        reply = await ask(self, peer, kind, content)
        if kind == ACQUIRE:
            self._drop(("127.0.0.1", peers.port), peer, "the link has ended")
        return reply

    add = decode.tier._agent.add_peer
    monkeypatch.setattr(PeerLinks, "_ask", ask_and_lose)
    monkeypatch.setattr(decode.tier._agent, "add_peer", lambda description: added.append(add(description)) or added[-1])
    pid = peers.start()
    assert "the link has ended" in decode.load("one").error
    assert not added
    peers.kill(pid)


def test_a_peer_that_returns_before_its_last_read_ends_stays_known() -> None:
    """Its process has one name, under which its new connection adds it again."""
    known, states = set[str](), iter(["PROC", "PROC", "DONE"])
    agent = NixlAgent()
    agent._agent = SimpleNamespace(
        add_remote_agent=lambda _: known.add("peer") or b"peer",  # type: ignore[func-returns-value]
        remove_remote_agent=known.remove,
        get_xfer_descs=lambda *_: None,
        initialize_xfer=lambda *_: None,
        transfer=lambda _: "PROC",
        check_xfer_state=lambda _: next(states),
    )
    assert agent.add_peer(b"") == "peer"
    places = np.zeros((1, 3), np.uint64)
    with pytest.raises(UnfinishedReadError) as given_up:
        agent.read("peer", places, places, lambda: True)
    agent.remove_peer("peer")
    assert agent.is_removing("peer")
    agent.add_peer(b"")
    wait_until(lambda: agent.has_ended(given_up.value), PATIENCE)
    assert known == {"peer"} and not agent.is_removing("peer")


def _list_states(pid: int) -> set[str]:
    """What the threads of a process do, as the kernel says; "T": stopped."""
    return {Path(task, "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()}


@pytest.mark.slow
def test_a_read_that_was_given_up_writes_to_no_buffer_that_is_used_again(
    decode: Decode, peers: PrefillPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill server is stopped in a read, and goes on when the read, its quarantine and the
    link have ended."""
    agent = decode.tier._agent
    read = agent.read
    pid = peers.start()
    assert decode.load(LEASES[0]).num_blocks == len(KEYS)

    def stop_and_read(*arguments: Any) -> None:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: _list_states(pid) == {"T"}, PATIENCE)  # else it may write a part before it stops
        read(*arguments)

    monkeypatch.setattr(nixl, "_READ_SECONDS", 0.5)
    monkeypatch.setattr(nixl, "QUARANTINE_SECONDS", 0.1)
    monkeypatch.setattr(authenticated_link, "SILENCE", 2.5)
    monkeypatch.setattr(agent, "read", stop_and_read)
    assert decode.load(LEASES[1]).num_blocks == 0, "the request computes"
    for buffer in decode.buffers:
        buffer.fill_(0)
    wait_until(lambda: not decode.links._peers, PATIENCE)
    assert decode.count_free() == NUM_BLOCKS - len(KEYS)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: decode.count_free() == NUM_BLOCKS, PATIENCE)
    for key, buffer in zip(KEYS, decode.buffers, strict=True):
        assert np.array_equal(buffer.numpy(), make_block(key, BLOCK_BYTES)), "it was written before it was free"
    assert not agent._removed, "the peer is forgotten too"
    peers.kill(pid)
