"""Weights that a trainer sends as tensors: afterwards an engine equals one that was started on
them."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame import Engine, SamplingParams
from frame.entrypoints.offline.engine import EngineError
from frame.loading.weight_commands import MAX_CHANNELS
from frame.rl import buckets
from frame.rl.buckets import HostBucket, describe
from frame.rl.weight_client import WeightClient, WeightUpdateError
from frame.testing.checkpoints import make_checkpoint

KEYS: dict[str, Any] = {
    "max_model_len": 256, "max_total_tokens": 4096, "threads": 1, "page_size": 4, "dtype": "float32",
    "weight_transfer": ["ipc", "group"],
}  # fmt: skip
PROMPTS = [list(range(start, start + 24)) for start in (10, 60)]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)
Tensors = dict[str, torch.Tensor]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("Qwen3ForCausalLM", {"dtype": "bfloat16"}),
    "int8": ("Qwen3ForCausalLM", {"quantization": "int8"}),
    "fp8": ("LlamaForCausalLM", {"quantization": "fp8"}),
    "moe": ("Qwen3MoeForCausalLM", {}),
    "moe int8": ("Qwen3MoeForCausalLM", {"quantization": "int8"}),
    "mla": ("DeepseekV3ForCausalLM", {}),
    "tp2": ("Qwen3MoeForCausalLM", {"tp": 2}),
    "pp2": ("Qwen3ForCausalLM", {"pp": 2}),
    "ep2": ("Qwen3MoeForCausalLM", {"tp": 2, "ep": 2}),
}


def outputs_of(engine: Engine) -> list[tuple[list[int], list[float | None]]]:
    outputs = (engine.generate(prompt, PARAMS) for prompt in PROMPTS)
    return [(output.token_ids, output.logprobs.logprobs) for output in outputs]


def read(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def count_children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def measure() -> dict[str, int]:
    """What grows where something leaks, of this process and its children."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.device.type == "cpu"]
    places = {each.data_ptr(): each.nbytes for each in tensors if not each.is_mkldnn and type(each) is not torch._subclasses.FakeTensor}
    pids = [os.getpid(), *count_children()]
    return {
        "tensors": sum(places.values()),
        "files": sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids),
        "maps": sum(Path(f"/proc/{pid}/maps").read_text().count("/dev/shm") for pid in pids),
        "shared": sum(path.name.startswith("frame-trainer-") for path in Path("/dev/shm").iterdir()),
        "resident": sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * os.sysconf("SC_PAGE_SIZE"),
    }


def count_growth(before: dict[str, int]) -> dict[str, int]:
    """By name; of resident memory what is more than 8 MiB, which the allocator may keep."""
    grown = {name: value - before[name] for name, value in measure().items()}
    return {**grown, "resident": grown["resident"] - (8 << 20)}


def connect(engine: Engine, kind: str) -> WeightClient:
    client = WeightClient(engine, timeout=60)
    if kind == "group":
        client.join_group()
    return client


# group: test_wrong_tensors_leave_the_old_weights; int8: tests/models/test_reloading.py
@pytest.mark.parametrize(("kind", "case"), [("ipc", "bf16"), pytest.param("group", "int8", marks=pytest.mark.exhaustive)])
def test_updates_equal_a_fresh_start(kind: str, case: str, tmp_path: Path) -> None:
    check_updates(kind, case, 4, tmp_path)


def test_groups_of_killed_trainers_take_bounded_memory(engine: Engine, folders: list[Path]) -> None:
    """Of a trainer that is killed no message comes."""
    for number in range(2 * MAX_CHANNELS):
        client = connect(engine, "group")
        client._group.shutdown()
        client._group = client._store = None
        if number == MAX_CHANNELS + 1:
            before = measure()
    assert measure()["files"] <= before["files"]
    assert connect(engine, "group").update(read(folders[1]), "v1") == "v1"


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["ipc", "group"])
def test_twenty_updates_equal_a_fresh_start(kind: str, case: str, tmp_path: Path) -> None:
    check_updates(kind, case, 20, tmp_path)


def check_updates(kind: str, case: str, num_updates: int, tmp_path: Path) -> None:
    """The bits of a fresh engine after each, and no growth from the second one on."""
    architecture, further = CASES[case]
    folders = [make_checkpoint(architecture, tmp_path / f"v{seed}", seed) for seed in range(2)]
    expected = []
    for folder in folders:
        with Engine(str(folder), **KEYS | further) as fresh:
            expected.append(outputs_of(fresh))
    assert expected[0] != expected[1]
    tensors = [read(folder) for folder in folders]
    bucket = sum(tensor.nbytes for tensor in tensors[0].values()) // 5
    with Engine(str(folders[0]), **KEYS | further) as engine:
        client = connect(engine, kind)
        for number, index in zip(range(num_updates), itertools.cycle((1, 0)), strict=False):
            assert client.update(tensors[index], f"step-{number}", bucket_bytes=bucket) == f"step-{number}"
            assert outputs_of(engine) == expected[index], f"update {number}"
            if number == 1:
                before = measure()
        end = time.monotonic() + 5.0  # threads free what they hold a moment later
        grown = count_growth(before)
        while max(grown.values()) > 0 and time.monotonic() < end:
            time.sleep(0.05)
            grown = count_growth(before)
        client.close()
        engine.control("check_integrity")
    assert {name: value for name, value in grown.items() if value > 0} == {}


@pytest.fixture
def engine(folders: list[Path]) -> Iterator[Engine]:
    with Engine(str(folders[0]), **KEYS) as running:
        yield running


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[Any]:
    found = []
    for folder in folders:
        with Engine(str(folder), **KEYS) as fresh:
            found.append(outputs_of(fresh))
    return found


PROJECTION = "model.layers.1.mlp.down_proj.weight"
WRONG: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "name": (lambda tensors: {**tensors, "model.other.weight": torch.ones(3)}, "holds model.other.weight, which the model does not have"),
    "shape": (lambda tensors: {**tensors, PROJECTION: tensors[PROJECTION][:, :-1]}, f"{PROJECTION} has the shape"),
    "dtype": (lambda tensors: {**tensors, PROJECTION: tensors[PROJECTION].to(torch.int8)}, f"{PROJECTION} is stored as int8"),
    "unknown dtype": (lambda tensors: {**tensors, PROJECTION: tensors[PROJECTION].to(torch.complex64)}, "has the dtype 'complex64'"),
}


@pytest.mark.parametrize("kind", ["ipc", "group"])
def test_wrong_tensors_leave_the_old_weights(kind: str, engine: Engine, folders: list[Path], expected: list[Any]) -> None:
    """The fault is found before the first write, in a part of all tensors."""
    client = connect(engine, kind)
    for alter, sentence in WRONG.values():
        with pytest.raises(WeightUpdateError, match=sentence):
            client.update(alter(read(folders[1])), "wrong")
        engine.flush_cache()  # the bits of cached prompts may differ
        assert outputs_of(engine) == expected[0]
        if kind == "group":
            client.join_group()  # an unknown dtype ends the group
    assert engine.control("server_info")["preempted"] == 0
    assert client.update(read(folders[1]), "right") == "right"
    assert outputs_of(engine) == expected[1]
    client.close()


@pytest.mark.parametrize("place", ["first", "second"])
def test_a_missing_tensor_is_named(place: str, engine: Engine, folders: list[Path], expected: list[Any]) -> None:
    """Nothing is served of an update that was not committed; without a copy the engine then waits
    for a whole one."""
    client = WeightClient(engine)
    client.update(read(folders[1]), "one")
    tensors = read(folders[0])
    del tensors[PROJECTION]
    with pytest.raises(WeightUpdateError, match=f"the tensors {PROJECTION} are missing; send them, or cancel"):
        client.update(tensors, "two", bucket_bytes=1 if place == "second" else 1 << 30)
    with pytest.raises(EngineError, match="the weights 'one' came from a trainer and were lost in a restart; update the weights"):
        engine.generate(PROMPTS[0], PARAMS)
    with pytest.raises(WeightUpdateError, match="a whole update is needed"):
        client.update(tensors, "two", partial=True)
    client.update(read(folders[1]), "three")
    assert outputs_of(engine) == expected[1]


def test_an_update_that_ends_early_brings_back_the_checkpoint(engine: Engine, folders: list[Path], expected: list[Any]) -> None:
    """Of the start, which was served before."""

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(read(folders[1]).items())[:5]
        raise KeyError("the trainer has a fault")

    client = WeightClient(engine)
    with pytest.raises(KeyError, match="the trainer has a fault"):
        client.update(broken(), bucket_bytes=1)
    assert outputs_of(engine) == expected[0]
    client.update(read(folders[1]))
    assert outputs_of(engine) == expected[1]


def test_kept_updates_survive_a_crash(folders: list[Path], expected: list[Any], tmp_path: Path) -> None:
    """The copy is that of the last update that was committed; older ones are deleted."""
    with Engine(str(folders[0]), keep_updates=str(tmp_path), **KEYS) as engine:
        client = WeightClient(engine)
        for number in (0, 1, 1):
            client.update(read(folders[number]), f"v{number}", bucket_bytes=100_000)
        (kept,) = tmp_path.iterdir()
        assert len(list(kept.glob("*.safetensors"))) > 1
        update = engine.transfer_weights("begin")["update"]
        name, tensor = next(iter(read(folders[0]).items()))
        with SharedBucket(tensor) as bucket:
            engine.transfer_weights("part", kind="ipc", part=bucket.part(name), update=update)
        with contextlib.suppress(EngineError):
            engine.transfer_weights("cancel", update=update)
        assert outputs_of(engine) == expected[1]
        assert engine.control("server_info")["weight_version"] == "v1"
        assert list(tmp_path.iterdir()) == [kept]


def test_too_little_shared_memory_is_an_error_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to a mapped file that finds no room would end it."""

    def fill(handle: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(buckets.os, "posix_fallocate", fill)
    before = set(buckets.FOLDER.iterdir())
    with contextlib.ExitStack() as stack, pytest.raises(WeightUpdateError, match=r"no room for a bucket of 2 MiB \(No space.*--shm-size"):
        WeightClient("http://unused")._make_host_bucket(2 << 20, stack)
    assert not [file for file in set(buckets.FOLDER.iterdir()) - before if file.name.startswith("frame-trainer-")]


class SharedBucket:
    """One tensor in shared memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._stack = contextlib.ExitStack()
        self._tensor = tensor
        self._memory = HostBucket(tensor.nbytes, self._stack)
        self._memory.write(0, tensor)

    def part(self, name: str, **changes: Any) -> dict[str, Any]:
        return {"tensors": [describe(name, self._tensor)], "buffers": [{**self._memory.describe(), **changes}]}

    def __enter__(self) -> SharedBucket:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def test_two_trainers_at_once(engine: Engine, folders: list[Path], expected: list[Any]) -> None:
    first, second = WeightClient(engine), WeightClient(engine)
    update = engine.transfer_weights("begin")["update"]
    for act in (lambda: second.update(read(folders[1])), second.join_group, lambda: engine.update_weights(folders[1])):
        with pytest.raises((WeightUpdateError, EngineError), match="update of the weights is in progress"):
            act()
    with pytest.raises(EngineError, match="this update of the weights has ended, or another one is in progress"):
        engine.transfer_weights("commit", update="another")
    name, tensor = next(iter(read(folders[1]).items()))
    with SharedBucket(tensor) as bucket:
        engine.transfer_weights("part", kind="ipc", part=bucket.part(name))
        with pytest.raises(EngineError, match=f"{name} came already in this update; another trainer may be sending it"):
            engine.transfer_weights("part", kind="ipc", part=bucket.part(name))
    with pytest.raises(EngineError, match="they are a mixture: the trainer cancelled it"):
        engine.transfer_weights("cancel", update=update)
    assert outputs_of(engine) == expected[0]
    first.update(read(folders[1]))
    assert outputs_of(engine) == expected[1]


def test_buffers_that_are_cut_off_or_elsewhere(engine: Engine, folders: list[Path], expected: list[Any], tmp_path: Path) -> None:
    name, tensor = next(iter(read(folders[1]).items()))
    (tmp_path / "secret").write_bytes(b"x" * tensor.nbytes)
    link = Path("/dev/shm") / f"frame-test-{os.getpid()}"
    link.symlink_to(tmp_path / "secret")
    try:
        with SharedBucket(tensor) as bucket:
            for changes, sentence in (
                ({"size": tensor.nbytes + 4096 * 100}, "it is cut off"),
                ({"size": tensor.nbytes - 1}, "but buffer 0 has"),
                ({"handle": f"../..{tmp_path}/secret"}, "is no name of a file in /dev/shm"),
                ({"handle": link.name}, "cannot be opened"),
                ({"handle": "frame-nothing"}, "cannot be opened: No such file"),
                ({"device": "GPU-0"}, "is on none of the devices"),
                ({"number": 1}, "is in buffer 0, which the part does not have"),
            ):
                with pytest.raises(EngineError, match=sentence):
                    engine.transfer_weights("part", kind="ipc", part=bucket.part(name, **changes))
    finally:
        link.unlink()
    assert outputs_of(engine) == expected[0]


def test_a_deadline_ends_an_update_whose_trainer_has_gone(folders: list[Path], expected: list[Any]) -> None:
    """A part of it was written, so the engine starts again with the weights of before."""
    with Engine(str(folders[0]), **KEYS | {"weight_update_timeout": 0.3}) as engine:
        name, tensor = next(iter(read(folders[1]).items()))
        with SharedBucket(tensor) as bucket:
            engine.transfer_weights("begin")
            engine.transfer_weights("part", kind="ipc", part=bucket.part(name))
        assert outputs_of(engine) == expected[0]
        engine.transfer_weights("begin")
        time.sleep(0.4)
        WeightClient(engine).update(read(folders[1]))
        assert outputs_of(engine) == expected[1]


def test_some_tensors_may_be_replaced(folders: list[Path], tmp_path: Path) -> None:
    """With `partial`. A layer of another form needs all of its tensors."""
    tensors = read(folders[0])
    tensors[PROJECTION] = read(folders[1])[PROJECTION]
    mixed = tmp_path / "mixed"
    shutil.copytree(folders[0], mixed)
    save_file(tensors, mixed / "model.safetensors", {"format": "pt"})
    for further in ({}, {"quantization": "int8"}):
        with Engine(str(mixed), **KEYS | further) as fresh:
            expected = outputs_of(fresh)
        with Engine(str(folders[0]), **KEYS | further) as engine:
            client = WeightClient(engine)
            client.update({PROJECTION: tensors[PROJECTION]}, partial=True)
            assert outputs_of(engine) == expected
            if further:
                query = "model.layers.0.self_attn.q_proj.weight"
                with pytest.raises(WeightUpdateError, match=r"the tensors model.layers.0.self_attn.k_proj.weight.* are missing"):
                    client.update({query: tensors[query]}, partial=True)


def test_an_engine_without_transfers(folders: list[Path]) -> None:
    sentence = "takes no tensors; start it with --weight-transfer NAME"
    with Engine(str(folders[0]), **KEYS | {"weight_transfer": []}) as engine, pytest.raises(WeightUpdateError, match=sentence):
        WeightClient(engine).update({})
    sentence = "takes tensors by ipc, not by group; start it with --weight-transfer group"
    with Engine(str(folders[0]), **KEYS | {"weight_transfer": ["ipc"]}) as engine, pytest.raises(WeightUpdateError, match=sentence):
        WeightClient(engine).join_group()
