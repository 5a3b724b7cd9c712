"""Detects the hardware of this machine without importing torch: /proc and /sys for the CPU, the
platforms' own functions for their devices. Makes no decisions."""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from frame.config.hardware import BF16_FEATURES, Hardware
from frame.core.interfaces.platform import PlatformCapabilities, UsableDevices
from frame.core.interfaces.plugin import PluginRecord
from frame.host.host_memory import measure_host_memory

_CGROUP = Path("/sys/fs/cgroup")

_log = logging.getLogger(__name__)


def probe(platforms: Sequence[PluginRecord] = (), environ: Mapping[str, str] | None = None) -> Hardware:
    """The hardware of this machine, with the devices of `platforms`. OMP_NUM_THREADS limits the
    number of cores: on a shared machine, more threads only slow each other down."""
    environ = os.environ if environ is None else environ
    each_platform = [devices for record in platforms if (devices := _find_devices(record)) is not None]
    accelerators = tuple(accelerator for devices in each_platform for accelerator in devices.accelerators)
    note = "; ".join(devices.note for devices in each_platform if devices.note)
    threads = environ.get("OMP_NUM_THREADS", "")
    cores = min(_cores(), int(threads)) if threads.isdigit() and int(threads) else _cores()
    memory, _ = measure_host_memory()
    return Hardware(cpu_cores=cores, memory_bytes=memory, cpu_features=_cpu_features(), accelerators=accelerators, note=note)


def _cores() -> int:
    """Physical cores that this process may use, limited by its cgroup's quota."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_read(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or str(cpu) for cpu in usable}
    quota = _read(_CGROUP / "cpu.max").split()
    allowed = int(quota[0]) // int(quota[1]) if len(quota) == 2 and quota[0].isdigit() else len(siblings)
    return max(1, min(len(siblings), allowed))


def _cpu_features() -> frozenset[str]:
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    flags = set(match.group(1).split()) if match else set()
    if {"sve", "svebf16"} <= flags:
        flags.add("sve_bf16")
    return frozenset(flags & {*BF16_FEATURES, "avx2", "avx512f"})


def _find_devices(record: PluginRecord) -> UsableDevices | None:
    """The devices of a platform; None: it has no function that finds them, or cannot be used. A
    function that fails finds none, and the note says why."""
    can = record.capabilities
    if record.problems or not isinstance(can, PlatformCapabilities) or can.find_devices is None:
        return None
    module, _, name = can.find_devices.partition(":")
    try:
        devices: UsableDevices = getattr(importlib.import_module(module), name)()
        wrong = {each.kind for each in devices.accelerators} - {record.name}
        if wrong:
            raise ValueError(f"{can.find_devices} returns devices of kind {', '.join(sorted(wrong))}")
    except Exception as error:  # noqa: BLE001 - a third party's function must not end the start of other platforms
        _log.debug("platform %s finds no devices", record.name, exc_info=True)
        return UsableDevices(note=f"platform {record.name} cannot find its devices: {type(error).__name__}: {error}")
    return devices


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
