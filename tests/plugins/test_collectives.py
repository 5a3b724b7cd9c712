"""Collectives: gloo between threads and processes, the choice by platform and ranks, and one of
another package that serves."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from frame.config.resolve import ResolveError
from frame.config.schema import FrameConfig
from frame.core.errors import ConfigurationError
from frame.core.interfaces.collective import Collective, CollectiveContext, LocalGroup
from frame.core.interfaces.platform import PlatformContext
from frame.entrypoints.configuration.prepare import prepare
from frame.kernels import peer_sum
from frame.plugins.collectives import P2pOptions, p2p
from frame.plugins.collectives.nccl import Nccl
from frame.plugins.loader import load_registry
from frame.testing import conformance
from frame.testing.conformance import run_suite
from frame.testing.ranks.collective import suite
from tests.plugins import fake_collective
from tests.plugins.fake_platform import FakePlatform
from tests.plugins.packages import check_package_serves

ROOT = Path(__file__).resolve().parents[2]


def subject(name: str) -> conformance.Subject:
    return conformance.find(load_registry(installed=False), f"collective:{name}", conformance.Setting())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gloo", "single"])
def test_in_tree_collectives_pass_the_suite(name: str) -> None:
    found = run_suite(subject(name))
    assert [each.check for each in found] == [check.name for check in suite(subject(name))]
    assert [each for each in found if each.result == "failed"] == []


def join(rank: int, size: int, folder: Path, timeout: float = 30.0) -> Any:
    return subject("gloo").target(CollectiveContext(rank, size, f"file://{folder / 'ranks'}", timeout=timeout))


def test_a_group_of_one_returns_its_arguments() -> None:
    group, x = LocalGroup(), torch.randn(2, 3)
    assert group.all_reduce(x) is group.all_gather(x) is group.broadcast(x) is group.reduce_scatter(x) is group.all_to_all(x, [2], [2]) is x
    with pytest.raises(ValueError, match="no rank"):
        group.send(x, 0)


def test_an_address_of_another_form_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="neither file:///PATH nor tcp://HOST:PORT"):
        subject("gloo").target(CollectiveContext(0, 2, "http://here"))


def test_named_groups_meet_at_one_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    groups: list[Any] = []
    found: list[list[float]] = [[] for _ in range(4)]

    def act(rank: int) -> None:
        places = (("pair", rank % 2, 2), ("all", rank, 4)) if rank < 2 else (("other", rank % 2, 2), ("all", rank, 4))
        for name, own, size in places:  # the groups are kept: rank 0's listens for all of them
            context = CollectiveContext(own, size, address, timeout=10.0, name=name, listens=rank == 0)
            groups.append(subject("gloo").target(context))
            found[rank].append(float(groups[-1].all_reduce(torch.full((1,), 10.0**rank))))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(act, range(4)))
    assert found == [[11.0, 1111.0]] * 2 + [[1100.0, 1111.0]] * 2


def test_p2p_chooses_by_the_size_of_the_message(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On this machine without GPUs: which kernel would sum, with the kernels replaced."""
    calls: list[str] = []

    def noted(name: str, result: int) -> Any:
        return lambda *arguments: (calls.append(name), arguments[result])[1]

    monkeypatch.setattr(Nccl, "__init__", Collective.__init__)
    monkeypatch.setattr(Nccl, "all_reduce", noted("nccl", 1))
    monkeypatch.setattr(p2p, "open_store", lambda context: None)
    monkeypatch.setattr(p2p.P2p, "_register", lambda self: None)
    shared = SimpleNamespace(buffer_ptrs=[0, 1])
    monkeypatch.setattr(p2p.P2p, "_share_memory", lambda self, size: (torch.empty(size, dtype=torch.uint8), shared))
    monkeypatch.setattr(peer_sum, "count_bytes", lambda size: 16)
    monkeypatch.setattr(peer_sum, "sum_peers", noted("one_shot", 0))
    monkeypatch.setattr(torch, "ops", SimpleNamespace(symm_mem=SimpleNamespace(two_shot_all_reduce_out=noted("two_shot", 3))))
    messages = (torch.ones(256), torch.ones(2, 512), torch.ones(2048), torch.ones(7), torch.ones(64, dtype=torch.int64), torch.ones(0))
    for size, expected in (
        (2, ["one_shot", "nccl", "nccl", "nccl", "nccl", "nccl"]),
        (3, ["one_shot", "nccl", "nccl", "nccl", "nccl", "nccl"]),  # the parts of two shots must be equal
        (4, ["one_shot", "two_shot", "nccl", "nccl", "nccl", "nccl"]),
    ):
        group = p2p.P2p(CollectiveContext(0, size, "file:///x"), P2pOptions(one_shot_bytes=1024, two_shot_bytes=4096))
        calls.clear()
        for x in messages:
            assert group.all_reduce(x).shape == x.shape
        assert calls == expected
    assert group.reduce_add_norm(torch.ones(2, 512), torch.ones(2, 512), torch.ones(512), 1e-5) is None  # above one_shot_bytes

    for size in (2, 4):  # NCCL adds in the order of the ranks, as the one-shot kernel does, and the two-shot kernel does not
        ordered = p2p.P2p(CollectiveContext(0, size, "file:///x", deterministic=True), P2pOptions(one_shot_bytes=1024, two_shot_bytes=4096))
        calls.clear()
        assert all(ordered.all_reduce(x).shape == x.shape for x in messages)
        assert calls == ["one_shot", *["nccl"] * 5]
    monkeypatch.setattr(peer_sum, "sum_add_norm", lambda x, *others: x)
    ordered = p2p.P2p(CollectiveContext(0, 2, "file:///x", deterministic=True))
    joined = [ordered.reduce_add_norm(torch.ones(2, columns), torch.ones(2, columns), torch.ones(columns), 1e-5) for columns in (512, 1024)]
    assert [each is not None for each in joined] == [False, True]  # a program of `add_rms_norm` has two rows of 512

    monkeypatch.setattr(Nccl, "all_gather", lambda self, x, dim: (calls.append("nccl"), torch.cat([x] * 4, dim))[1])
    monkeypatch.setattr(peer_sum, "gather_peers", lambda x, peers: (calls.append("kernel"), torch.cat([x] * 4, 1))[1])
    calls.clear()
    for shape, dim in (((2, 32), -1), ((2, 3, 16), 1), ((16, 3), 0), ((2, 20), 1), ((3, 512), -1)):
        x = torch.rand(shape)
        assert torch.equal(group.all_gather(x, dim), torch.cat([x] * 4, dim))
    assert calls == ["kernel"] * 3 + ["nccl"] * 2

    copied = SimpleNamespace(sum=lambda parts, out: out.copy_(torch.cat([part.view(-1) for part in parts]).view(out.shape)))
    monkeypatch.setattr(p2p, "PeerCopies", lambda *arguments: copied)
    platform = FakePlatform(PlatformContext())
    monkeypatch.setattr(FakePlatform, "is_capturing", property(lambda self: captures))
    for captures, expected in ((False, ["one_shot"]), (True, ["one_shot", *["nccl"] * 3])):
        group = p2p.P2p(CollectiveContext(0, 2, "file:///x", platform), P2pOptions(one_shot_bytes=1024, copies=True))
        calls.clear()
        assert all(torch.equal(group.all_reduce(x), x) for x in (*messages[:3], torch.ones(33, 9).t()))
        assert calls == expected
        x = torch.arange(330.0).view(33, 10)
        found = [group.reduce_matmul(lambda rows: 2 * rows[:, :9], rows, 9) for rows in (x, x[:28])]  # the second fits one shot
        assert found[1] is None and (found[0] is None if captures else torch.equal(found[0], 2 * x[:, :9]))  # type: ignore[arg-type]

    def refuse(*arguments: Any) -> Any:
        raise RuntimeError("CUDA error: peer access is not supported\nmore")

    monkeypatch.setattr(p2p.P2p, "_share_memory", refuse)
    group = p2p.P2p(CollectiveContext(0, 2, "file:///x"))
    calls.clear()
    assert group.reduce_add_norm(torch.ones(2, 16), torch.ones(2, 16), torch.ones(16), 1e-5) is None
    assert [group.all_reduce(x).shape == x.shape for x in messages] == [True] * 6 and calls == ["nccl"] * 6
    assert "all sums are by NCCL: CUDA error: peer access is not supported" in caplog.messages[-1]


RANK = """
import os, sys, torch
from frame.core.interfaces.collective import CollectiveContext
from frame.plugins.collectives.gloo import Gloo
torch.set_num_threads(1)
group = Gloo(CollectiveContext(1, 2, f"file://{sys.argv[1]}/ranks", timeout=30.0))
group.all_reduce(torch.ones(1000))
if sys.argv[2] == "dies":
    os._exit(9)
if sys.argv[2] == "closes":
    group.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["closes", "forgets", "dies"])
def test_the_end_of_a_rank(tmp_path: Path, ending: str) -> None:
    """A process ends cleanly with and without `close` (a group that outlives the interpreter would
    abort it); when a rank dies, the others' next call raises instead of waiting for the timeout."""
    other = subprocess.Popen([sys.executable, "-c", RANK, tmp_path, ending], cwd=ROOT, stderr=subprocess.PIPE)
    group = join(0, 2, tmp_path)
    assert group.all_reduce(torch.ones(1000))[0] == 2
    _, errors = other.communicate(timeout=300)
    assert other.returncode == (9 if ending == "dies" else 0), errors.decode()
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        group.all_reduce(torch.ones(1))
    assert time.monotonic() - start < 10
    group.close()


def chosen(tp: int, **parallel: Any) -> str:
    sections = {"execution": {"device": "cpu"}, "parallel": {"tp": tp, **parallel}}
    return prepare(FrameConfig.model_validate(sections)).resolved.choice("collective").name


def test_the_choice_follows_from_platform_and_ranks() -> None:
    assert (chosen(1), chosen(2), chosen(1, collective="gloo")) == ("single", "gloo", "gloo")
    with pytest.raises(ResolveError, match="takes tensors of cuda, not of cpu"):
        chosen(2, collective="nccl")
    with pytest.raises(ResolveError, match=r"connects at most 1 rank\(s\), not 2 \(try parallel.tp: 1\)"):
        chosen(2, collective="single")


@pytest.mark.slow
def test_a_collective_of_another_package_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_package_serves(tmp_path, monkeypatch, "collective", "store", fake_collective.__name__, "single")


def test_pytorch_finds_a_registered_group_by_its_name(tmp_path: Path) -> None:
    group = subject("gloo").target(CollectiveContext(0, 1, f"file://{tmp_path / 'ranks'}"))
    store = dist.FileStore(str(tmp_path / "store"), 1)
    registered = p2p.register_group("frame test", store, group._groups[0], torch.device("cpu"))
    found = dist.distributed_c10d._resolve_process_group("frame test")
    assert (found.group_name, found.rank(), found.size()) == ("frame test", 0, 1)
    p2p.unregister_group("frame test", registered)
    with pytest.raises(RuntimeError, match="frame test"):
        dist.distributed_c10d._resolve_process_group("frame test")
    group.close()
