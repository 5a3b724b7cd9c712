"""The channels between ranks: the codec of batches, orders and their replies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frame.core.interfaces.batch import ScheduledBatch, SlotSetup, StepResult
from frame.core.interfaces.runner import ModelRunner, ProfileError, ProfileRequest
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc import transport
from frame.core.ipc.transport import ZmqSender
from frame.host.socket_directory import SocketDirectory
from frame.parallel import rank_channels
from frame.parallel.rank_channels import BatchReceiver, BatchSender, Profile, Traced, decode_batch, encode_batch
from frame.parallel.tp_follower import LeadingRunner, follow


def make_batch(step: int = 3, rows: int = 4, seed: int = 0, full: bool = True) -> ScheduledBatch:
    r = np.random.default_rng(seed)
    ints = lambda *shape: r.integers(0, 99, shape, dtype=np.int32)  # noqa: E731
    setup = SlotSetup(1, SamplingParams(stop=("x",), logit_bias={3: 0.5}), 2**63 - 1, 2, ints(5))
    return ScheduledBatch(
        step=step,
        num_decodes=rows // 2,
        slots=ints(rows),
        num_computed=ints(rows),
        num_scheduled=ints(rows),
        token_ids=ints(rows * 3),
        samples=r.random(rows) < 0.5,
        new_pages=ints(rows, 3),
        setups=[setup] if full else [],
        released=[1, 2],
        prompt_logprobs=r.random(rows) < 0.5 if full else None,
        grammar_mask=ints(rows, 4) if full else None,
    )


def assert_equal(left: object, right: object) -> None:
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert (left == right).all()
    elif isinstance(left, msgspec.Struct):
        for name in left.__struct_fields__:
            assert_equal(getattr(left, name), getattr(right, name))
    elif isinstance(left, list):
        assert isinstance(right, list)
        for a, b in zip(left, right, strict=True):
            assert_equal(a, b)
    else:
        assert left == right


@given(rows=st.integers(0, 9), seed=st.integers(0, 99), full=st.booleans())
def test_batches_are_decoded_as_encoded(rows: int, seed: int, full: bool) -> None:
    batch = make_batch(rows=rows, seed=seed, full=full)
    back = decode_batch(encode_batch(batch))
    assert_equal(batch, back)
    assert back.slots.flags.writeable


def test_undecodable_bytes_are_refused() -> None:
    good = msgspec.msgpack.decode(encode_batch(make_batch()))
    good["slots"] = ["O", [1], b"12345678"]
    with pytest.raises((msgspec.ValidationError, TypeError), match="plain data"):
        decode_batch(msgspec.msgpack.encode(good))
    with pytest.raises(msgspec.ValidationError):
        decode_batch(msgspec.msgpack.encode({"step": 1}))
    with pytest.raises(TypeError, match="cannot be sent to another rank"):
        encode_batch(msgspec.structs.replace(make_batch(), released=[object()]))  # type: ignore[list-item]


class Recorder(ModelRunner):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def launch(self, batch: ScheduledBatch) -> Recorder:
        self.steps.append(batch.step)
        return self

    def wait(self) -> StepResult:
        return StepResult(step=self.steps[-1], token_ids=np.empty(0, np.int32))

    def close(self) -> None:
        self.closed = True


def test_followers_run_what_rank_0_runs() -> None:
    sockets = SocketDirectory()
    addresses = [sockets.address(f"batches-{i}") for i in (1, 2)]
    runners = [Recorder(), Recorder()]
    replies = sockets.address("replies")
    receivers = [BatchReceiver(address, rank, replies) for rank, address in enumerate(addresses, 1)]
    watched: list[Any] = []
    observer = SimpleNamespace(on_launch=lambda batch: watched.append(batch.step), on_end=watched.append)
    threads = [threading.Thread(target=follow, args=each) for each in zip(runners, receivers, (None, observer), strict=True)]
    for thread in threads:
        thread.start()
    own = Recorder()
    sender = BatchSender(addresses, replies)
    leader = LeadingRunner(own, sender)
    for step in range(20):
        leader.launch(make_batch(step)).wait()
    sender.send_order(Traced("mine", "00-a-b-01"))
    leader.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert own.steps == runners[0].steps == runners[1].steps == list(range(20))
    assert watched == [*range(20), Traced("mine", "00-a-b-01")]
    assert own.closed
    assert all(runner.closed for runner in runners)
    sockets.remove()


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BatchSender, BatchReceiver, str]]:
    """Rank 0's end, rank 1's, and the address of the latter. What an end sent last may have no
    receiver when it closes."""
    monkeypatch.setattr(transport, "FLUSH_MS", 50)
    address, replies = f"ipc://{tmp_path}/batches", f"ipc://{tmp_path}/replies"
    receiver = BatchReceiver(address, 1, replies)
    sender = BatchSender([address], replies)
    yield sender, receiver, address
    receiver.close()
    sender.close()


def test_a_batch_that_cannot_be_decoded_ends_the_follower(
    ranks: tuple[BatchSender, BatchReceiver, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise rank 0 would wait for this rank in a collective operation for ever."""
    sender, receiver, _ = ranks
    runner = Recorder()
    sender.send(make_batch(0))
    monkeypatch.setattr(rank_channels, "encode_batch", lambda batch: encode_batch(batch)[:-9])
    sender.send(make_batch(1))
    with pytest.raises(RuntimeError, match="cannot be decoded"):
        follow(runner, receiver)
    assert runner.steps == [0]
    assert not runner.closed  # its device may wait for other ranks, for ever


def test_bytes_without_framing_are_dropped(ranks: tuple[BatchSender, BatchReceiver, str], caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver, address = ranks
    foreign_sender = ZmqSender(address)
    foreign_sender._socket.send(b"junk")
    foreign_sender._socket.send_multipart([b"junk", b"junk"])
    foreign_sender.close()
    sender.send(make_batch(3))
    batch = receiver.receive()
    assert isinstance(batch, ScheduledBatch)
    assert batch.step == 3


class Profiled(Recorder):
    """Records a profile once the test allows it."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.may, self.requests, self.error = threading.Event(), [], error

    def profile(self, request: ProfileRequest | None) -> str:
        assert self.may.wait(10)
        if self.error:
            raise ProfileError(self.error)
        self.requests.append(request)
        return "trace"


@pytest.mark.parametrize("error", ["", "the disk is full"])
def test_a_profile_is_answered_once_all_ranks_have_started(ranks: tuple[BatchSender, BatchReceiver, str], error: str) -> None:
    sender, receiver, _ = ranks
    own, other = Profiled(), Profiled(error)
    own.may.set()
    leader = LeadingRunner(own, sender)
    follower = threading.Thread(target=follow, args=(other, receiver), daemon=True)
    follower.start()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(leader.profile, ProfileRequest())
        with pytest.raises(TimeoutError):
            reply.result(0.2)
        other.may.set()
        if error:
            with pytest.raises(ProfileError, match="rank 1: the disk is full"):
                reply.result(10)
        else:
            assert reply.result(10) == "trace"
            assert other.requests == [ProfileRequest()]
    leader.launch(make_batch(0)).wait()
    sender._send_all(b"")
    follower.join(10)
    assert other.steps == [0]


def test_a_rank_that_does_not_answer_is_named(ranks: tuple[BatchSender, BatchReceiver, str]) -> None:
    sender, receiver, _ = ranks
    assert sender.ask(Profile(None), timeout=0.05) == ["rank 1 did not answer within 0.05 s"]
    receiver.receive()
    receiver.reply("late")  # does not answer the next order
    threading.Thread(target=lambda: (receiver.receive(), receiver.reply())).start()
    assert sender.ask(Profile(None), timeout=10) == []
