"""The conformance suite of `platform/2`: device, memory, streams, events and graphs.

Run by the conformance option of the pytest plugin. On a device that computes synchronously, checks
of streams and graphs are skipped. Must not know a platform by name.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import psutil
import torch

from frame.core.errors import ConfigurationError
from frame.core.interfaces.platform import (
    DeviceMemory,
    Platform,
    PlatformCapabilities,
    PlatformContext,
    SupportsGraphs,
    SupportsSleep,
    SupportsStreams,
    SupportsSynchronisationChecks,
    UsableDevices,
)
from frame.host.host_memory import measure_host_memory
from frame.host.interpreter import child_environment, python_command
from frame.plugins.devices import capture_graph
from frame.testing.conformance import Check, SkipCheck, Subject, collect
from frame.testing.generators import require_bounded, require_fast

MAX_CALL_SECONDS = 1e-3  # of a call that each step makes
MAX_MEASURE_SECONDS = 0.01  # of a call at a start or with a heartbeat
_SIZE = 1 << 16
_PAUSE = 0.03  # seconds between two events
_PINNED = (torch.uint8, torch.float32, torch.int32, torch.int64, torch.bfloat16)


def suite(subject: Subject) -> Iterable[Check]:
    """The checks of a platform, on the device that the setting names, or its first one."""
    index = subject.setting.device.partition(":")[2]
    platform: Platform = subject.target(PlatformContext(int(index or 0)), subject.options)
    yield Check("record_finds_devices", partial(_record_finds_devices, subject, platform))
    yield Check("devices_are_found_without_torch", partial(_devices_are_found_without_torch, subject))
    yield Check("graphs_match_the_record", partial(_graphs_match_the_record, subject, platform))
    if getattr(subject.record.capabilities, "is_host", False):
        yield Check("threads_are_those_of_the_context", partial(_threads_are_those_of_the_context, subject))
    yield from collect(__name__, platform)


def _record_finds_devices(subject: Subject, platform: Platform) -> None:
    can = subject.record.capabilities
    assert isinstance(can, PlatformCapabilities), "the record's capabilities must be PlatformCapabilities"
    memory = platform.measure_memory()
    assert memory.is_shared or not can.is_host, "the record names no function that finds devices, and the device has memory of its own"
    if can.find_devices is None:
        return
    module, _, name = can.find_devices.partition(":")
    devices = getattr(importlib.import_module(module), name)()
    assert isinstance(devices, UsableDevices), f"{can.find_devices} must return UsableDevices"
    assert devices.accelerators, f"{can.find_devices} finds no device here: {devices.note}"
    wrong = {each.kind for each in devices.accelerators} - {subject.record.name}
    assert not wrong or subject.record.target.startswith("mutants:"), f"the kind of a device must be {subject.record.name}, not {wrong}"
    device = devices.accelerators[platform.context.local_index]
    assert device.memory_bytes > 0 and device.name == platform.device_name, "the platform and its record name different devices"
    assert device.compute_capability == platform.compute_capability, "the platform and its record have different compute capabilities"
    share = memory.total / device.memory_bytes
    assert 0.7 < share < 1.1, f"the device has {device.memory_bytes} bytes by its record, and {memory.total} by measure_memory()"


def _devices_are_found_without_torch(subject: Subject) -> None:
    """Help and the start of a server ask for the devices, and torch takes seconds to import."""
    can = subject.record.capabilities
    if not isinstance(can, PlatformCapabilities) or can.find_devices is None:
        raise SkipCheck("the record names no function that finds devices")
    module, _, name = can.find_devices.partition(":")
    code = f"import importlib, sys; importlib.import_module({module!r}).{name}(); sys.exit('torch' in sys.modules)"
    command, paths = python_command("-c", code), {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, env=child_environment(paths), capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, f"{can.find_devices} imports torch, or fails in a process of its own: {ended.stderr[-300:]}"


def _threads_are_those_of_the_context(subject: Subject) -> None:
    """Ranks of one host divide its cores."""
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            subject.target(PlatformContext(0, threads=count), subject.options).activate()
            assert torch.get_num_threads() == count, f"with threads={count}, activate() leaves PyTorch {torch.get_num_threads()} threads"
    finally:
        torch.set_num_threads(before)


def check_device_computes(platform: Platform) -> None:
    platform.activate()
    assert platform.device_name.strip(), "device_name must not be empty"
    x = torch.arange(_SIZE, dtype=torch.float32, device=platform.device)
    assert x.device.type == platform.device.type
    total = float((x + 1).double().sum())
    assert total == _SIZE * (_SIZE + 1) / 2, "the device adds wrongly"
    kinds = {type(each) for each in platform.profiler_activities}
    assert kinds == {torch.profiler.ProfilerActivity}, "profiler_activities holds values of torch.profiler.ProfilerActivity, at least one"


def check_memory_is_consistent(platform: Platform) -> None:
    memory = platform.measure_memory()
    assert isinstance(memory, DeviceMemory) and all(type(size) is int for size in (memory.total, memory.free, memory.reserved, memory.peak))
    assert 0 < memory.free <= memory.total, "free memory must be positive and at most the total"
    assert 0 <= memory.reserved <= memory.total and 0 <= memory.peak <= memory.total, "reserved and peak must be at most the total"
    assert platform.count_reserved() == memory.reserved, "count_reserved and measure_memory disagree"
    is_counted = memory.free + memory.reserved <= memory.total
    assert is_counted, "free holds memory that this process has reserved, so that a cache of its size does not fit: subtract it"


def check_memory_of_the_host_is_shared(platform: Platform) -> None:
    """Caches of the host are taken from the same memory: it is not counted twice."""
    memory = platform.measure_memory()
    is_of_host = platform.device.type == "cpu" and memory.total in (psutil.virtual_memory().total, measure_host_memory()[0])
    assert memory.is_shared or not is_of_host, "measure_memory() is that of the host, and does not say `is_shared`"


def check_memory_is_that_of_now(platform: Platform) -> None:
    """A cache is sized by what is free now, after the weights are there."""
    before = platform.measure_memory()
    if not before.is_shared:
        raise SkipCheck("the device's memory is not the host's; check_allocations_count asks its allocator")
    for _ in range(3):
        with mmap.mmap(-1, 64 << 20) as held:
            held.write(bytes(64 << 20))
            now = platform.measure_memory()
            assert now.total == before.total, "total is the size of the memory, which does not change while 64 MiB are used"
            assert now.total - now.free >= 64 << 20, "free leaves out what is in use: 64 MiB are, and it is the total but for less"
            if now != before:
                return
    raise AssertionError("measure_memory() says the same before and after 64 MiB are used")


def check_allocations_count(platform: Platform) -> None:
    if platform.device.type == "cpu":
        raise SkipCheck("the host's allocator does not count")
    platform.release_memory()
    before = platform.measure_memory()
    held = torch.empty(64 << 20, dtype=torch.uint8, device=platform.device)
    after = platform.measure_memory()
    assert after.reserved >= before.reserved and after.reserved >= held.numel(), "an allocation must count as reserved"
    assert after.peak >= held.numel(), "an allocation must count for the peak"
    assert after.total == before.total and after.total - after.free >= held.numel(), "an allocation must not count as free"
    del held
    platform.release_memory()
    assert platform.count_reserved() < after.reserved, "release_memory must give unused memory back"


def check_pinned_memory_is_separate(platform: Any) -> None:
    _needs_streams(platform)
    forms = [(shape, dtype) for shape in ((3, 5), (0,), (17,), (17,)) for dtype in _PINNED]
    held = [platform.allocate_pinned(*form) for form in forms]
    for (shape, dtype), tensor in zip(forms, held, strict=True):
        assert tuple(tensor.shape) == shape and tensor.dtype == dtype, "pinned memory must have the shape and dtype that were asked for"
        assert tensor.device.type == "cpu" and tensor.is_contiguous(), "pinned memory is contiguous memory of the host"
    for value, tensor in enumerate(held):
        tensor.fill_(value)
    same = (bool((tensor == torch.tensor(value).to(tensor.dtype)).all()) for value, tensor in enumerate(held))
    assert all(same), "two calls of allocate_pinned returned the same memory"


def check_pinned_memory_has_any_size(platform: Any) -> None:
    """Staging arrays of a step are small, those of a KV tier large."""
    _needs_streams(platform)
    for shape in ((24 << 20,), (3, 1 << 20), (5, 4097), ()):
        tensor = platform.allocate_pinned(shape, torch.uint8)
        assert tuple(tensor.shape) == shape, f"allocate_pinned({shape}) has the shape {tuple(tensor.shape)}"
        tensor.fill_(7)
        assert bool((tensor == 7).all()), f"pinned memory of the shape {shape} does not keep what is written"


def check_memory_that_is_dropped_is_freed(platform: Any) -> None:
    """A platform keeps no tensor, stream or event that its caller has dropped."""
    _needs_streams(platform)

    def use(number: int) -> None:
        platform.allocate_pinned((64,), torch.float32)
        platform.create_event().record()
        with platform.use_stream(platform.get_side_stream()):
            platform.get_current_stream()

    require_bounded(platform, use, 800, "pinned tensors, events and streams")


def check_calls_of_a_step_are_fast(platform: Platform) -> None:
    """They cost no more than the library's."""
    require_fast(platform.measure_memory, MAX_MEASURE_SECONDS, "measure_memory()")
    require_fast(platform.count_reserved, MAX_MEASURE_SECONDS, "count_reserved()")
    require_fast(platform.activate, MAX_CALL_SECONDS, "activate()")
    if not isinstance(platform, SupportsStreams):
        return
    stream, event, before = platform.create_stream(), platform.create_event(), platform.get_current_stream()
    calls: dict[str, Callable[[], object]] = {
        "create_event()": platform.create_event,
        "get_current_stream()": platform.get_current_stream,
        "set_stream()": partial(platform.set_stream, before),
        "record() of an event": partial(event.record, before),
        "allocate_pinned() of 64 numbers": partial(platform.allocate_pinned, (64,), torch.float32),
    }
    for what, call in calls.items():
        require_fast(call, MAX_CALL_SECONDS, what)
    require_fast(platform.create_stream, MAX_MEASURE_SECONDS, "create_stream()")
    assert platform.get_current_stream() == before and stream != before, "creating streams and events changes the current stream"


def check_seeds_repeat(platform: Platform) -> None:
    """`torch.manual_seed` seeds the device, too."""

    def draw(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return torch.rand(8, device=platform.device).tolist() + torch.rand(8).tolist()

    first = draw(7)
    assert first == draw(7), "the same seed must give the same random numbers"
    assert first != draw(8), "another seed must give other random numbers"
    torch.manual_seed(7)
    platform.activate()
    _in_thread(platform.activate)
    drawn = torch.rand(8, device=platform.device).tolist() + torch.rand(8).tolist()
    assert drawn == first, "activate(), which each thread calls, must leave the random numbers as they are"


def check_defaults_are_left_alone(platform: Platform) -> None:
    """`activate()` chooses the device of the thread, not what new tensors are."""
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.bfloat16):
            torch.set_default_dtype(dtype)
            with torch.inference_mode():
                platform.activate()
                assert torch.is_inference_mode_enabled(), "activate() must leave the inference mode as it is"
            made = torch.empty(0)
            assert (made.dtype, made.device.type) == (dtype, "cpu"), f"after activate(), a new tensor is {made.dtype} on {made.device}"
            assert torch.is_grad_enabled(), "activate() must leave the gradient mode as it is"
            assert float(torch.tensor(1e-40) * 1) > 0, "activate() must leave the smallest numbers of the host as they are"
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_flush_denormal(False)


def _needs_streams(platform: Any) -> Any:
    """A new stream."""
    if not isinstance(platform, SupportsStreams):
        raise SkipCheck("calls of this platform are synchronous")
    return platform.create_stream()


def check_streams_differ(platform: Any) -> None:
    first, second = _needs_streams(platform), _needs_streams(platform)
    assert first != second, "create_stream must return a new stream each time"
    assert first != platform.get_current_stream(), "create_stream must not return the current stream"


def check_streams_are_current_by_thread(platform: Any) -> None:
    stream = _needs_streams(platform)
    before = platform.get_current_stream()
    seen: list[object] = []
    platform.set_stream(stream)
    try:
        assert platform.get_current_stream() == stream, "set_stream must change the current stream"

        def look() -> None:
            platform.activate()
            seen.append(platform.get_current_stream())

        _in_thread(look)
        assert seen[0] != stream, "set_stream must change the current stream of the calling thread alone"
    finally:
        platform.set_stream(before)
    assert platform.get_current_stream() == before


def check_use_stream_restores(platform: Any) -> None:
    stream = _needs_streams(platform)
    before = platform.get_current_stream()
    try:
        with platform.use_stream(stream):
            assert platform.get_current_stream() == stream, "use_stream must change the current stream"
            raise KeyError
    except KeyError:
        pass
    assert platform.get_current_stream() == before, "use_stream must restore the stream, also after an error"


def check_side_stream_is_one(platform: Any) -> None:
    _needs_streams(platform)
    side = platform.get_side_stream()
    assert side == platform.get_side_stream(), "there is one side stream for all layers"
    assert side != platform.get_current_stream(), "the side stream must not be the current one"


def check_events_follow_copies(platform: Any) -> None:
    stream = _needs_streams(platform)
    event = platform.create_event()
    event.synchronize()  # was never recorded: returns at once
    x = torch.ones(1 << 20, device=platform.device)
    host = platform.allocate_pinned(x.shape, x.dtype)
    stream.wait_stream(platform.get_current_stream())
    with platform.use_stream(stream):
        for _ in range(20):
            x = x * 2
        host.copy_(x, non_blocking=True)
        event.record()
    event.synchronize()
    assert bool((host == 2.0**20).all()), "an event must come after what was queued before it"
    platform.get_current_stream().wait_event(event)
    platform.synchronize()


def check_events_measure_time(platform: Any) -> None:
    _needs_streams(platform)
    first, second = (platform.create_event(is_timed=True) for _ in range(2))
    x = torch.ones(1 << 20, device=platform.device)
    platform.synchronize()
    began = time.perf_counter()
    first.record()
    for _ in range(20):
        x = x * 2
    time.sleep(_PAUSE)
    second.record()
    second.synchronize()
    elapsed, limit = first.elapsed_time(second), 1e3 * (time.perf_counter() - began) + 1
    what = "elapsed_time gives the milliseconds between two events"
    assert 500 * _PAUSE < elapsed < limit, f"{what}: {elapsed} for at least {1e3 * _PAUSE:.0f} ms, and at most {limit:.0f}"


def check_synchronisation_is_found_or_not(platform: Any) -> None:
    x = torch.ones(8, device=platform.device)
    if not isinstance(platform, SupportsSynchronisationChecks):
        raise SkipCheck("this platform does not detect calls that wait for the device")
    with platform.check_synchronisation(is_allowed=False), platform.check_synchronisation(is_allowed=True):
        assert float(x.sum()) == 8
    assert float(x.sum()) == 8, "check_synchronisation must end with its block"


# sleep --------------------------------------------------------------------------------------------


def check_tags_are_released_and_mapped(platform: Any) -> None:
    device = platform.device
    if not isinstance(platform, SupportsSleep):
        raise SkipCheck("this platform releases no memory")
    try:
        with platform.tag_allocations("weights"):
            weights = torch.arange(_SIZE, dtype=torch.float32, device=device)
        with platform.tag_allocations("kv_cache"):
            pool = torch.ones(4 << 20, dtype=torch.float32, device=device)
    except ConfigurationError as error:
        raise SkipCheck(str(error)) from None
    addresses = weights.data_ptr(), pool.data_ptr()
    for _ in range(2):
        taken = _count_taken(platform)
        held = platform.release_tag("weights", [weights], keeps_values=True)
        left = taken - _count_taken(platform)
        assert held == 0 or left > held / 2, f"release_tag counts {held} bytes whose values it keeps in that memory; return 0 for them"
        assert held == 0 or held >= weights.nbytes / 2, f"release_tag returns {held} for {weights.nbytes} bytes; return the released bytes"
        taken = _count_taken(platform)
        released = platform.release_tag("kv_cache", [pool], keeps_values=False)
        assert pool.nbytes / 2 < released, "release_tag returns the released bytes"
        left = taken - _count_taken(platform)
        assert left > pool.nbytes / 2, f"release_tag says that it released {released} bytes, and {left} are free again"
        platform.map_tag("kv_cache", [pool])
        platform.map_tag("weights", [weights])
        assert (weights.data_ptr(), pool.data_ptr()) == addresses
        assert float(weights.double().sum()) == _SIZE * (_SIZE - 1) / 2, "kept values come back"
        assert bool(((pool == 0) | (pool == 1)).all()), "other values are zeros, or what they were"
        pool.fill_(1)
        assert float(pool.double().sum()) == pool.numel(), "mapped memory can be written"


def _count_taken(platform: Any) -> int:
    """Bytes that this process takes on the device; of the host, those that are in memory."""
    memory = platform.measure_memory()
    return psutil.Process().memory_info().rss if memory.is_shared else memory.total - memory.free


# graphs -------------------------------------------------------------------------------------------


def _needs_graphs(platform: Platform) -> None:
    if not isinstance(platform, SupportsGraphs):
        raise SkipCheck("this platform captures no graphs")


def _graphs_match_the_record(subject: Subject, platform: Platform) -> None:
    can = subject.record.capabilities
    offers = isinstance(can, PlatformCapabilities) and can.graphs
    assert isinstance(platform, SupportsGraphs) == offers, "the record says `graphs` if, and only if, the class derives from SupportsGraphs"
    assert isinstance(platform, SupportsStreams) or not offers, "graphs need streams"


def _captured(platform: Platform) -> tuple[torch.Tensor, list[torch.Tensor], Callable[[], None]]:
    """An input, the result of a captured product of it, and the graph's replay."""
    x, results = torch.ones(4, 4, device=platform.device), []
    torch.mm(x, x)  # initialises what must not be initialised in a capture
    graph = capture_graph(platform, lambda: results.append(torch.mm(x, x) + 1))
    return x, results, graph.replay


def check_graphs_replay(platform: Any) -> None:
    _needs_graphs(platform)
    x, (result,), replay = _captured(platform)
    address = result.data_ptr()
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        replay()
        platform.synchronize()
        assert bool((result == 4 * value**2 + 1).all()), "a replay must compute the captured work with the values of now"
    assert result.data_ptr() == address


def check_graphs_compute_nothing_else(platform: Any) -> None:
    _needs_graphs(platform)
    count = torch.zeros(1, device=platform.device)
    _, _, replay = _captured(platform)
    count += 1
    replay()
    platform.synchronize()
    assert float(count) == 1, "a graph must not hold work from after its capture"


def check_captures_end(platform: Any) -> None:
    _needs_graphs(platform)
    seen: list[bool] = []
    capture_graph(platform, lambda: seen.append(platform.is_capturing))
    assert seen == [True], "is_capturing must be true inside of a capture"
    assert not platform.is_capturing, "is_capturing must be false after the capture"

    def fails() -> None:
        raise KeyError

    with contextlib.suppress(KeyError, RuntimeError):
        capture_graph(platform, fails)
    assert not platform.is_capturing, "a capture must end after an error"
    check_graphs_replay(platform)


def check_captures_are_of_one_thread(platform: Any) -> None:
    _needs_graphs(platform)
    count = torch.zeros(1, device=platform.device)
    seen: list[bool] = []

    def other() -> None:
        platform.activate()
        count.add_(1)
        seen.append(platform.is_capturing)

    def captured() -> None:
        torch.add(x, 1)
        _in_thread(other)

    x = torch.ones(4, device=platform.device)
    graph = capture_graph(platform, captured)
    platform.synchronize()
    assert seen == [False], "a capture of one thread must not show in another"
    graph.replay()
    platform.synchronize()
    assert float(count) == 1, "a capture must not record what other threads do"


def check_borrowed_memory_is_the_same(platform: Any) -> None:
    _needs_graphs(platform)
    owner = torch.arange(48, device=platform.device).float().view(4, 12)[:, 3:9].unflatten(1, (2, 3))
    lent = platform.borrow(owner)
    assert lent.data_ptr() == owner.data_ptr() and lent.stride() == owner.stride(), "borrow must return the same memory"
    assert lent.dtype == owner.dtype and torch.equal(lent, owner), "borrow must return the same values"


def _in_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
