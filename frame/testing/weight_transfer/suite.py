"""The conformance suite of weight transfers: what is received, buffers, failures, and what stays
open. Must not know a plugin by name.

The suite is the trainer; `trainers` says how it sends to a plugin.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from frame.core.interfaces.weight_transfer import TransferError, TransferPart
from frame.interfaces.weight_transfer import WeightTransfer, WeightTransferCapabilities, WeightTransferContext
from frame.testing.conformance import Check, SkipCheck, Subject, find_checks, unchanged_process
from frame.testing.generators import make_alike, require_bounded
from frame.testing.weight_transfer import shared_checks
from frame.testing.weight_transfer.trainers import FOLDER, FileTrainer, GroupTrainer, Named, Trainer

TIMEOUT = 1.0  # seconds of the transfers under test
MARGIN = 4.0  # seconds that a failure may come later
MAX_END_SECONDS = 5.0  # seconds that what is closed may take to end
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int64)


class Rig:
    """A transfer of each rank, and the trainer."""

    def __init__(self, subject: Subject, num_ranks: int = 1, timeout: float = TIMEOUT) -> None:
        can = subject.record.capabilities
        self.capabilities = can if isinstance(can, WeightTransferCapabilities) else WeightTransferCapabilities()
        make = getattr(subject.target, "make_conformance_trainer", GroupTrainer if self.capabilities.joins else FileTrainer)
        self.trainer: Trainer = make(num_ranks)
        contexts = [WeightTransferContext(torch.device("cpu"), rank, num_ranks, timeout) for rank in range(num_ranks)]
        self.transfers: list[WeightTransfer] = [subject.target(context, subject.options) for context in contexts]

    @property
    def layouts(self) -> tuple[str, ...]:
        """Those that the transfer may not refuse."""
        return ("separate", "flattened") if self.capabilities.joins else ("separate",)

    @property
    def transfer(self) -> WeightTransfer:
        return self.transfers[0]

    def open(self) -> Rig:
        together(self.trainer.join, *(partial(each.open, self.trainer.info) for each in self.transfers))
        return self

    def receive(self, tensors: Named, layout: str = "separate", rank: int = 0) -> list[tuple[str, torch.Tensor]]:
        part = self.trainer.offer(tensors, layout)
        return self.take(part, tensors, layout, rank)

    def take(self, part: TransferPart, tensors: Named, layout: str = "separate", rank: int = 0) -> list[tuple[str, torch.Tensor]]:
        received: list[tuple[str, torch.Tensor]] = []

        def consume() -> None:
            for name, tensor in self.transfers[rank].receive(part):
                received.append((name, tensor.clone()))

        together(partial(self.trainer.send, tensors, layout), consume)
        return received

    def require_joins(self) -> None:
        if not self.capabilities.joins:
            raise SkipCheck("the transfer does not join its trainer")

    def require_shares(self) -> None:
        if not self.capabilities.shares:
            raise SkipCheck("the transfer reads no shared memory")

    def close(self) -> None:
        for each in self.transfers:
            each.close()
        self.trainer.close()


Make = Callable[..., Rig]


def suite(subject: Subject) -> Iterator[Check]:
    """`weight_transfer/1`."""
    for name, check in (each for module in (__name__, shared_checks.__name__) for each in find_checks(module)):
        yield Check(name, partial(_run, check, subject))


def _run(check: Any, subject: Subject) -> None:
    rigs: list[Rig] = []

    def make(num_ranks: int = 1, **arguments: Any) -> Rig:
        rigs.append(Rig(subject, num_ranks, **arguments))
        return rigs[-1]

    try:
        check(make)
    finally:
        for rig in rigs:
            rig.close()


def together(*calls: Callable[[], object]) -> None:
    """Run calls at the same time; the last one in this thread. Raises its error, or else one of the
    others'."""
    errors: list[BaseException] = []

    def work(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(call,), daemon=True) for call in calls[:-1]]
    for thread in threads:
        thread.start()
    calls[-1]()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def make_tensors(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Tensors of several types and shapes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(8, 16), (5,), (), (2, 3, 4), (1, 1), (33, 7)]
    values = [(torch.randn(shape, generator=generator) * 50).to(dtype) for shape, dtype in zip(shapes, DTYPES, strict=True)]
    return [(f"model.layers.{number}.weight", value) for number, value in enumerate(values)]


def compare(received: Named, sent: Named) -> None:
    names = [name for name, _ in received]
    assert names == [name for name, _ in sent], f"received are {', '.join(names)[:200]}, not the tensors of the part in its order"
    for (name, tensor), (_, expected) in zip(received, sent, strict=True):
        assert tensor.dtype == expected.dtype, f"{name} comes as {tensor.dtype}, and was sent as {expected.dtype}"
        assert tensor.shape == expected.shape, f"{name} comes with the shape {list(tensor.shape)}, not {list(expected.shape)}"
        assert torch.equal(tensor.contiguous(), expected.contiguous()), f"{name} has other values than were sent"


@contextlib.contextmanager
def refuses(what: str, seconds: float = TIMEOUT + MARGIN) -> Iterator[None]:
    """The body raises TransferError, in time and with one sentence."""
    start = time.monotonic()
    try:
        yield
    except TransferError as error:
        took, sentence = time.monotonic() - start, str(error)
        assert took < seconds, f"{what} is an error after {took:.1f} seconds, with a timeout of {TIMEOUT:g}"
        assert sentence and "\n" not in sentence and "Traceback" not in sentence, f"the error of {what} is no sentence: {sentence!r:.200}"
        return
    except Exception as error:
        raise AssertionError(f"{what} raises {type(error).__name__}, not TransferError: {error}") from error
    raise AssertionError(f"{what} is no error")


def check_tensors_are_received_as_sent(make: Make) -> None:
    rig, tensors = make().open(), make_tensors()
    compare(rig.receive(tensors), tensors)


def check_tensors_of_no_values(make: Make) -> None:
    rig, tensors = make().open(), [("empty", torch.empty(0, 4)), ("one", torch.ones(1)), ("none", torch.empty(0))]
    compare(rig.receive(tensors), tensors)


def check_a_large_tensor_is_whole(make: Make) -> None:
    """Larger than buffers of pipes, sockets and pages."""
    rig, tensors = make().open(), [("large", torch.arange(1 << 20, dtype=torch.int32)), ("after", torch.ones(3))]
    compare(rig.receive(tensors), tensors)


def check_parts_follow_one_another(make: Make) -> None:
    """The trainer writes each into the same memory. The same names come in every update."""
    rig = make().open()
    for seed in range(4):
        tensors = make_tensors(seed)
        compare(rig.receive(tensors), tensors)
    tensors = make_tensors(9)[::-1][:3]
    compare(rig.receive(tensors), tensors)


def check_a_tensor_is_valid_until_the_next(make: Make) -> None:
    rig, tensors = make().open(), [(f"t{number}", torch.full((64,), float(number))) for number in range(5)]
    part = rig.trainer.offer(tensors)

    def consume() -> None:
        for (name, tensor), (_, expected) in zip(rig.transfer.receive(part), tensors, strict=True):
            first = tensor.clone()
            time.sleep(0.03)
            assert torch.equal(tensor, first), f"the values of {name} change before the next tensor is requested"
            assert torch.equal(tensor, expected), f"{name} has other values than were sent"

    together(partial(rig.trainer.send, tensors), consume)


def check_the_senders_memory_is_not_written(make: Make) -> None:
    rig, tensors = make().open(), make_tensors()
    part = rig.trainer.offer(tensors)
    rig.require_shares()
    (buffer,) = part.buffers
    before = (FOLDER / buffer.handle).read_bytes()
    for _, tensor in rig.transfer.receive(part):
        tensor.zero_()
    assert (FOLDER / buffer.handle).read_bytes() == before, "a change of a received tensor changes the trainer's memory"


def check_flattened_parts(make: Make) -> None:
    """They are received, or refused."""
    rig, tensors = make().open(), make_tensors()
    if rig.capabilities.joins:
        compare(rig.receive(tensors, "flattened"), tensors)
        return
    with refuses("a flattened part"):
        list(rig.transfer.receive(rig.trainer.offer(tensors, "flattened")))


def check_parts_are_not_kept(make: Make) -> None:
    """A trainer sends thousands of parts over one connection."""
    rig, tensors = make().open(), [("model.norm.weight", torch.ones(4)), ("lm_head.weight", torch.ones(2, 3))]
    require_bounded(rig.transfer, lambda number: rig.receive(tensors), 120, "parts that were received", slack=30)


def check_names_and_numbers_are_kept(make: Make) -> None:
    """Names that are equal in up to 128 characters, and integers that are no float64."""
    numbers = torch.tensor([2**53 + 1, -(2**62) - 1, 2**63 - 1])
    names = [name for pair in make_alike(fill="w") for name in pair]
    rig, tensors = make().open(), [(name, numbers + place) for place, name in enumerate(names)]
    compare(rig.receive(tensors), tensors)


def check_ranks_receive_the_same(make: Make) -> None:
    rig, tensors = make(2).open(), make_tensors()
    part = rig.trainer.offer(tensors)
    received: list[list[tuple[str, torch.Tensor]]] = [[], []]

    def consume(rank: int) -> None:
        received[rank] += [(name, tensor.clone()) for name, tensor in rig.transfers[rank].receive(part)]

    together(partial(rig.trainer.send, tensors), partial(consume, 1), partial(consume, 0))
    for each in received:
        compare(each, tensors)


def check_transfers_are_independent(make: Make) -> None:
    first, second = make().open(), make().open()
    for rig, seed in ((first, 1), (second, 2), (first, 3)):
        tensors = make_tensors(seed)
        compare(rig.receive(tensors), tensors)
    second.close()
    tensors = make_tensors(4)
    compare(first.receive(tensors), tensors)


def check_a_part_that_is_cut_off(make: Make) -> None:
    """No tensor is returned of which the trainer sent a half, and the error comes in time."""
    rig, tensors = make().open(), [("first", torch.ones(100)), ("second", torch.ones(1000))]
    part = rig.trainer.offer(tensors)
    rig.trainer.cut()
    with refuses("a part that is cut off"):
        for name, _ in rig.transfer.receive(part):
            assert name != "second", "a tensor is returned whose values the trainer did not send"


def check_a_file_that_is_cut_off_while_it_is_read(make: Make) -> None:
    rig, tensors = make().open(), [(f"t{number}", torch.ones(1 << 14)) for number in range(4)]
    rig.require_shares()
    part = rig.trainer.offer(tensors)
    with refuses("a buffer that is cut off while it is read"):
        for name, _ in rig.transfer.receive(part):
            assert name != "t3", "a tensor is returned whose values are gone"
            rig.trainer.cut()


def check_a_trainer_that_sends_nothing(make: Make) -> None:
    rig, tensors = make().open(), make_tensors()
    rig.require_joins()
    with refuses("a part that does not come"):
        list(rig.transfer.receive(rig.trainer.offer(tensors)))


def check_a_trainer_that_does_not_join(make: Make) -> None:
    rig = make()
    rig.require_joins()
    with refuses("a trainer that does not join"):
        rig.transfer.open(rig.trainer.info)


def check_parts_after_a_failure(make: Make) -> None:
    """Of a new connection, where the trainer joins."""
    rig, tensors = make().open(), make_tensors()
    part = rig.trainer.offer(tensors)
    rig.trainer.cut()
    with refuses("a part that is cut off"):
        list(rig.transfer.receive(part))
    if rig.capabilities.joins:
        rig = make().open()
    compare(rig.receive(tensors), tensors)


def check_unknown_fields_are_refused(make: Make) -> None:
    rig = make()
    with refuses("an unknown field of open"):
        rig.transfer.open({**rig.trainer.info, "unknown_field": 1})


def check_missing_and_wrong_fields_are_refused(make: Make) -> None:
    rig = make()
    for name in rig.trainer.info:
        if name not in ("group_name", "backend"):
            with refuses(f"open without {name}"):
                rig.transfer.open({key: value for key, value in rig.trainer.info.items() if key != name})
        with refuses(f"open with a list as {name}"):
            rig.transfer.open({**rig.trainer.info, name: []})


def check_receive_needs_open(make: Make) -> None:
    rig, tensors = make(), make_tensors()
    rig.require_joins()
    with refuses("a part before open"):
        list(rig.transfer.receive(rig.trainer.offer(tensors)))


def check_close_ends_the_connection(make: Make) -> None:
    rig, tensors = make().open(), make_tensors()
    rig.transfer.close()
    rig.transfer.close()
    if rig.capabilities.joins:
        with refuses("a part after close"):
            list(rig.transfer.receive(rig.trainer.offer(tensors)))


def _mark(part: TransferPart, **changes: Any) -> TransferPart:
    return msgspec.structs.replace(part, buffers=tuple(msgspec.structs.replace(each, **changes) for each in part.buffers))


def _refuse_part(rig: Rig, part: TransferPart, what: str) -> None:
    received = []
    with refuses(what):
        for name, _ in rig.transfer.receive(part):
            received.append(name)
    assert not received, f"{what} is an error after {len(received)} tensor(s) were returned"


def check_handles_are_names_in_shared_memory(make: Make) -> None:
    """No path leads out of /dev/shm, and no link is followed."""
    rig, tensors = make().open(), [("secret", torch.zeros(4, dtype=torch.uint8))]
    rig.require_shares()
    part = rig.trainer.offer(tensors)
    outside = Path(__file__)
    link, folder = FOLDER / f"frame-suite-link-{os.getpid()}", FOLDER / f"frame-suite-folder-{os.getpid()}"
    link.symlink_to(outside)
    folder.mkdir()
    try:
        paths = (str(outside), f"../..{outside}", f"{folder.name}/../../..{outside}")
        for handle in (*paths, link.name, folder.name, "", ".", "frame-suite-none"):
            _refuse_part(rig, _mark(part, handle=handle, size=64), f"the handle {handle!r}")
    finally:
        link.unlink()
        folder.rmdir()


def check_tensors_outside_of_their_buffer(make: Make) -> None:
    """They are refused before the first tensor."""
    rig, tensors = make().open(), make_tensors()
    rig.require_shares()
    part = rig.trainer.offer(tensors)
    (buffer,) = part.buffers
    *others, last = part.tensors
    for offset in (buffer.size, buffer.size - last.num_bytes + 1, -1):
        wrong = msgspec.structs.replace(part, tensors=(*others, msgspec.structs.replace(last, offset=offset)))
        _refuse_part(rig, wrong, f"a tensor at offset {offset} of a buffer of {buffer.size} bytes")
    _refuse_part(rig, _mark(part, size=buffer.size + 1), "a buffer that is larger than its file")
    _refuse_part(rig, _mark(part, number=1), "a tensor of a buffer that the part does not have")
    _refuse_part(rig, _mark(part, device="GPU-00000000-0000-0000-0000-000000000000"), "a buffer of another device")


def check_a_tensor_may_fill_its_buffer(make: Make) -> None:
    """From its first byte to its last, in a file of that size, which may be 0."""
    rig, tensor = make().open(), torch.arange(60, dtype=torch.int32).view(4, 15)
    rig.require_shares()
    part = rig.trainer.offer([("whole", tensor)])
    (buffer,) = part.buffers
    (FOLDER / buffer.handle).write_bytes(tensor.numpy().tobytes())
    whole = msgspec.structs.replace(_mark(part, size=tensor.nbytes), tensors=(msgspec.structs.replace(part.tensors[0], offset=0),))
    compare([(name, received.clone()) for name, received in rig.transfer.receive(whole)], [("whole", tensor)])
    (FOLDER / buffer.handle).write_bytes(b"")
    nothing = msgspec.structs.replace(_mark(part, size=0), tensors=(msgspec.structs.replace(part.tensors[0], offset=0, shape=(0, 15)),))
    compare([(name, received.clone()) for name, received in rig.transfer.receive(nothing)], [("whole", tensor[:0])])


def check_nothing_is_unpickled(make: Make) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the transfer unpickles what it receives")

    rig, tensors = make(), make_tensors()
    with contextlib.ExitStack() as stack:
        for module, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load")):
            stack.enter_context(unittest.mock.patch.object(module, name, refuse))
        rig.open()
        compare(rig.receive(tensors), tensors)


def _count_open() -> tuple[int, int, int]:
    """Files, mappings of shared memory, and threads of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return len(list(Path("/proc/self/fd").iterdir())), maps.count(f"{FOLDER}/frame-suite"), threading.active_count()


def check_parts_leave_nothing_open(make: Make) -> None:
    rig, tensors = make().open(), make_tensors()
    rig.receive(tensors)
    before = _count_open()
    for number in range(10):
        rig.receive(tensors)
        rig.receive([("odd", torch.ones(2 * number + 1, dtype=torch.uint8))])  # which one buffer is for alone
    _require_no_more(before, "20 parts")


def check_abandoned_and_refused_parts_leave_nothing_open(make: Make) -> None:
    rig, tensors = make().open(), make_tensors()
    rig.require_shares()
    part = rig.trainer.offer(tensors)
    before = _count_open()
    for _ in range(5):
        with contextlib.closing(rig.transfer.receive(part)) as received:  # type: ignore[type-var]
            next(received)
        with contextlib.suppress(TransferError):
            list(rig.transfer.receive(_mark(part, size=1 << 40)))
    _require_no_more(before, "parts that were not received")


def check_close_leaves_nothing_open(make: Make) -> None:
    """Also where `open` fails."""

    def use() -> None:
        rig = make().open()
        rig.receive(make_tensors())
        rig.close()
        with contextlib.suppress(TransferError):
            rig.transfer.open({"unknown_field": 1})

    use()
    time.sleep(1.0)  # a backend's threads end later
    files, *others = _count_open()
    for _ in range(5):
        use()
    _require_no_more((files + 5, *others), "closed transfers")


def _require_no_more(before: Sequence[int], what: str) -> None:
    """What ends late, such as a backend's threads on a busy machine, has some seconds to do so."""
    after, end = _count_open(), time.monotonic() + MAX_END_SECONDS
    while any(now > then for now, then in zip(after, before, strict=True)):
        assert time.monotonic() < end, f"{what} leave files, mappings and threads open: {after}, before {tuple(before)}"
        time.sleep(0.02)
        after = _count_open()


def check_the_process_stays_as_it_is(make: Make) -> None:
    rig = make()
    with unchanged_process("the transfer changes"):
        rig.open()
        rig.receive(make_tensors())
        rig.close()
