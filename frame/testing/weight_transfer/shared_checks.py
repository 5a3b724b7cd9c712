"""Checks of weight transfers by memory that trainers share, and of `close`: types, what is no file,
and what is left. Used by the suite of the kind. Must not know a plugin by name."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import socket
import threading
import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from frame.core.interfaces.weight_transfer import TRANSFER_DTYPES, TransferError, TransferPart
from frame.testing.weight_transfer.trainers import FOLDER

Make = Callable[..., Any]  # -> a Rig of the suite, which imports this module
LATE = 6.0  # seconds with which a transfer under test fails late at most
CLOSE_SECONDS = 5.0  # in which `open` ends after `close`, with a timeout of OPEN_SECONDS
OPEN_SECONDS = 60.0
LARGE = 1 << 20  # bytes of a tensor


def check_all_types_are_received(make: Make) -> None:
    """All of `TRANSFER_DTYPES`, bytes of any value, among them no number."""
    rig, generator, sent = make().open(), torch.Generator().manual_seed(0), list[tuple[str, torch.Tensor]]()
    for name in TRANSFER_DTYPES:
        dtype: torch.dtype = getattr(torch, name)
        data = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 40), generator=generator, dtype=torch.uint8)
        sent.append((name, data.view(dtype)))
    received = rig.receive(sent, rig.layouts[-1])  # bytes: a backend such as gloo sends no float8 itself
    assert [name for name, _ in received] == list(TRANSFER_DTYPES), f"of all types are received {[name for name, _ in received]}"
    for (name, tensor), (_, expected) in zip(received, sent, strict=True):
        form = (tensor.dtype, tensor.shape)
        assert form == (expected.dtype, expected.shape), f"a tensor in {name} comes as {form[0]} {list(form[1])}"
        same = torch.equal(tensor.contiguous().view(torch.uint8), expected.view(torch.uint8))
        assert same, f"a tensor in {name} has other bytes than were sent"


def check_handles_of_what_is_no_file(make: Make) -> None:
    """A pipe or a socket by the name of a handle is refused in time; nothing waits for it."""
    rig, tensors = make().open(), [("bytes", torch.zeros(4, dtype=torch.uint8))]
    rig.require_shares()
    part, pipe = rig.trainer.offer(tensors), FOLDER / f"frame-suite-pipe-{os.getpid()}-{secrets.token_hex(4)}"
    buffers = tuple(msgspec.structs.replace(each, handle=pipe.name) for each in part.buffers)
    ends: list[Any] = []

    def receive() -> None:
        try:
            ends.append(list(rig.transfer.receive(TransferPart(part.tensors, buffers))))
        except TransferError as error:
            ends.append(error)
        except Exception as error:  # noqa: BLE001 - shown below
            ends.append(repr(error))

    os.mkfifo(pipe)
    try:
        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        thread.join(LATE)
        if is_late := not ends:  # let the thread go on
            os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
        assert not is_late, f"the handle of a pipe is no error after {LATE:g} seconds"
        assert isinstance(ends[0], TransferError), f"the handle of a pipe ends with {ends[0]!r:.200}, not TransferError"
    finally:
        pipe.unlink()


def check_files_of_other_users(make: Make) -> None:
    """A file that does not belong to the server's user is refused: any user may make one by a name
    that a trainer is about to use."""
    rig, tensors = make().open(), [("bytes", torch.zeros(4, dtype=torch.uint8))]
    rig.require_shares()
    part = rig.trainer.offer(tensors)
    own = os.geteuid()
    with contextlib.ExitStack() as stack:
        try:
            os.chown(FOLDER / part.buffers[0].handle, own + 1, -1)
        except OSError:  # root alone may: the server's user is another one than the file's
            for name in ("geteuid", "getuid"):
                stack.enter_context(unittest.mock.patch.object(os, name, lambda: own + 1))
        try:
            received = list(rig.transfer.receive(part))
        except TransferError:
            return
        except Exception as error:
            raise AssertionError(f"a file of another user raises {type(error).__name__}, not TransferError: {error}") from error
    raise AssertionError(f"a file of another user is read, and {len(received)} tensor(s) are returned")


def check_close_frees_memory(make: Make) -> None:
    """No tensor that was received, nor memory for it, is held afterwards by the transfer."""
    rig = make().open()
    for layout in rig.layouts:
        rig.receive([("large", torch.ones(LARGE, dtype=torch.uint8)), ("more", torch.ones(LARGE, dtype=torch.uint8))], layout)
    rig.transfer.close()
    held = [each for each in _list_reachable(rig.transfer) if isinstance(each, torch.Tensor) and each.nbytes >= LARGE]
    assert not held, f"{sum(each.nbytes for each in held)} bytes of tensors are held after `close`"


def _list_reachable(plugin: object, maximum: int = 20_000) -> list[object]:
    """The objects that a plugin's attributes refer to, no modules, types and functions."""
    waiting, seen = [*getattr(plugin, "__dict__", {}).values()], dict[int, object]()
    while waiting and len(seen) < maximum:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, type | type(os)) and not callable(one):
            seen[id(one)] = one
            waiting += gc.get_referents(one)
    return list(seen.values())


def check_close_ends_an_open_that_waits(make: Make) -> None:
    """Another thread closes the transfer, whose trainer is not there yet."""
    rig = make(timeout=OPEN_SECONDS)
    rig.require_joins()
    info, ends = rig.trainer.info, list[Any]()
    unreachable = {key: _find_free_port() if key.endswith("port") else value for key, value in info.items()}

    def wait() -> None:
        try:
            ends.append(rig.transfer.open(unreachable))  # type: ignore[func-returns-value]
        except TransferError as error:
            ends.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.3)
    rig.transfer.close()
    thread.join(CLOSE_SECONDS)
    assert ends, f"`open` goes on waiting {CLOSE_SECONDS:g} seconds after `close`"
    assert isinstance(ends[0], TransferError), "`open` succeeds without a trainer"


def _find_free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
