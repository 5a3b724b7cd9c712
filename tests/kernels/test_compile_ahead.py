"""`compile_ahead` without a GPU: a driver that only names a target, and kernels that are compiled
by name."""

from __future__ import annotations

import threading
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from frame import kernels
from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.config.schema import FrameConfig
from frame.core.execution.staging import SharedMemory, map_arrays
from frame.core.execution.warmup import idle_decodes, idle_mixed, idle_prompts
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes import components
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.kernels import compile_ahead as ahead
from frame.kernels.cache import CACHE_DIR_VARIABLE, count_compilations
from frame.kernels.compile_ahead import compile_ahead
from frame.kernels.elementwise.activation import _silu_mul
from frame.kernels.launch import PreparedLaunch
from frame.testing.checkpoints import make_checkpoint
from frame.testing.local_loop import LocalLoop

pytestmark = pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter compiles nothing")

CPU = torch.device("cpu")
DEVICES = count(99)  # an index for each test: Triton keeps the kernels of a device in the process
SIZES = (64, 128, 256, 512)


@triton.jit
def _fill(out):
    tl.store(out + tl.arange(0, 64), 0.0)


class FakeCode:
    """A compiled kernel that notes its launches."""

    def __init__(self, name: str, launches: list[str]) -> None:
        self.name, self.launches = name, launches
        self.function = self.packed_metadata = self.metadata = None
        self.src = name

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *_: Any) -> None:
        self.launches.append(self.name)

    def __getitem__(self, grid: Any) -> Any:
        return self.run


class FakeCompiler:
    """What takes the place of Triton's compiler: `jobs` are (kernel, thread) in order."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, int]] = []
        self.launches: list[str] = []
        self.launchers: list[str] = []
        self.error: Exception | None = None
        self.wait: Any = lambda: None

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.jobs]

    def compile(self, kernel: Any, key: str, signature: Any, device: int, constants: dict[Any, Any], *_: Any) -> FakeCode:
        block = {kernel.arg_names[place]: value for (place,), value in constants.items()}.get("BLOCK", "")
        self.jobs.append((f"{kernel.fn.__name__}{block}", threading.get_ident()))
        self.wait()
        if self.error is not None:
            raise self.error
        code = FakeCode(self.jobs[-1][0], self.launches)
        kernel.device_caches[device][0][key] = code
        return code


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    chip = GPUTarget("cuda", 90, 32)
    device = next(DEVICES)
    fake = SimpleNamespace(get_current_target=lambda: chip, get_current_device=lambda: device, get_current_stream=lambda _: 0)
    fake.launcher_cls = lambda *_: None
    monkeypatch.setattr(driver, "_active", fake)
    return fake


@pytest.fixture
def compiler(target: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    found = FakeCompiler()
    target.launcher_cls = lambda name, _: found.launchers.append(name)
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *arguments: found.compile(*arguments))  # noqa: PLW0108 - takes the kernel as `self`
    return found


def constants_of(block: int) -> dict[str, Any]:
    return {name: (block if name == "BLOCK" else 1) for name in _silu_mul.arg_names[4:] if name != "PDL"}


def prepare_kernel(block: int) -> PreparedLaunch:
    return PreparedLaunch(_silu_mul, (torch.bfloat16, torch.bfloat16, 0, 256), constants_of(block), CPU, 4)


def launch_kernel(block: int) -> None:
    x = torch.zeros(512, dtype=torch.bfloat16)
    _silu_mul[(1,)](x, x, 1, 256, **constants_of(block), PDL=False)


def test_kernels_are_compiled_once_and_launched_after_the_block_only(compiler: FakeCompiler) -> None:
    x = torch.zeros(512, dtype=torch.bfloat16)
    before = prepare_kernel(64)
    with compile_ahead():
        prepared = prepare_kernel(128)
        for launch in (before, prepared):
            launch((1, 1, 1), (x, x), (1,))
        launch_kernel(256)
        launch_kernel(256)
    assert sorted(compiler.names) == ["_silu_mul128", "_silu_mul256", "_silu_mul64"]
    assert not compiler.launches
    assert isinstance(prepared.compiled, FakeCode)
    prepared((1, 1, 1), (x, x), (1,))
    launch_kernel(256)
    assert compiler.launches == ["_silu_mul128", "_silu_mul256"]
    assert len(compiler.jobs) == 3


def test_kernels_are_compiled_at_the_same_time(compiler: FakeCompiler) -> None:
    compiler.wait = threading.Barrier(len(SIZES), timeout=20).wait
    with compile_ahead():
        for block in SIZES:
            launch_kernel(block)
    assert len({thread for _, thread in compiler.jobs} | {threading.get_ident()}) == len(SIZES) + 1


@pytest.mark.parametrize(("rank", "order"), [(0, [0, 2, 1, 3]), (1, [1, 3, 0, 2])])
def test_ranks_begin_with_different_kernels(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, rank: int, order: list[int]) -> None:
    monkeypatch.setattr(ahead, "THREADS", 1)
    with compile_ahead(rank, 2):
        for block in SIZES:
            launch_kernel(block)
        assert not compiler.jobs
    assert compiler.launchers == compiler.names == [f"_silu_mul{SIZES[place]}" for place in order]


def test_the_longest_kernel_is_compiled_first(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "THREADS", 1)
    monkeypatch.setattr(_fill, "module", "frame.kernels.short")
    with compile_ahead():
        _fill[(1,)](torch.zeros(64))
        launch_kernel(64)
    assert compiler.names == ["_silu_mul64", "_fill"]


def test_kernels_are_named_in_the_order_of_launches(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a start that finds them in the cache."""
    monkeypatch.setattr(_fill, "module", "frame.kernels.short")
    for kernel in (_fill, _silu_mul):
        monkeypatch.setattr(kernel, "hash", None)
    with compile_ahead():
        _fill[(1,)](torch.zeros(64))
        assert _fill.hash is not None
        assert _silu_mul.hash is None
        launch_kernel(64)
        assert _silu_mul.hash is not None
        assert not compiler.jobs


def test_other_threads_and_the_kernels_of_others_run(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    with compile_ahead():
        other = threading.Thread(target=launch_kernel, args=(64,))
        other.start()
        other.join()
        monkeypatch.setattr(_silu_mul, "module", "plugin.kernels")
        launch_kernel(128)
    assert compiler.launches == ["_silu_mul64", "_silu_mul128"]
    assert compiler.jobs == [("_silu_mul64", other.ident), ("_silu_mul128", threading.get_ident())]


def test_a_kernel_that_does_not_compile_raises_at_its_launch(compiler: FakeCompiler) -> None:
    compiler.error = RuntimeError("no such instruction")
    with compile_ahead():
        launch_kernel(64)
        prepared = prepare_kernel(128)
    x = torch.zeros(512, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="no such instruction"):
        prepared((1, 1, 1), (x, x), (1,))
    with pytest.raises(RuntimeError, match="no such instruction"):
        launch_kernel(64)


def test_triton_compiles_in_the_threads(target: SimpleNamespace, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    with count_compilations() as counts:
        with compile_ahead():
            prepared = prepare_kernel(128)
        assert (counts.compiled, counts.loaded) == (1, 0)
        assert "ptx" in prepared.compiled.asm
        assert prepare_kernel(128).compiled is prepared.compiled
        _silu_mul.device_caches.clear()
        prepare_kernel(128)  # as another rank, which finds it in the folder
    assert (counts.compiled, counts.loaded) == (1, 1)


def test_what_is_compiled_after_the_start_is_named(
    target: SimpleNamespace, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(kernels, "can_use_triton", lambda _: True)
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(triton.knobs.runtime, name, None)
    ahead.report_compilations(CPU)
    monkeypatch.setattr(ahead, "REPORTED", 0.0)
    other = threading.Thread(target=prepare_kernel, args=(64,))  # requests do not wait for it
    other.start()
    other.join()
    monkeypatch.setattr(_fill, "module", "plugin.kernels")
    _fill.warmup(torch.float32, grid=(1,))
    assert not caplog.messages
    prepare_kernel(128)
    prepare_kernel(128)
    (message,) = caplog.messages
    assert "while _silu_mul[num_warps=4" in message
    assert "was compiled" in message


def make_config(path: Any) -> FrameConfig:
    return FrameConfig.model_validate(
        {
            "model": {"path": str(path), "dtype": "bfloat16"},
            "cache": {"max_total_tokens": 8192},
            "scheduler": {"max_running_requests": 8, "chunked_prefill_size": 128},
            "execution": {"device": "cpu"},
            "speculative": {"algorithm": "draft_model", "draft_model_path": str(path)} if path == find_model(EMBEDDED) else {},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [
        EMBEDDED,
        *(pytest.param(f"{name}ForCausalLM", marks=pytest.mark.soak) for name in ("DeepseekV3", "Qwen3_5Moe", "GptOss", "NemotronH")),
    ],
)
def test_steps_without_launches(architecture: str, compiler: FakeCompiler, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a start read valid indices: a CPU raises an error for others. Those of requests
    need no further kernel."""
    from frame.attention_backends.triton import backend

    monkeypatch.setattr(kernels, "can_use_triton", lambda _: True)
    monkeypatch.setattr(kernels, "get_shared_memory", lambda _: 232_448)
    monkeypatch.setattr(backend, "INTERPRETED", True)
    monkeypatch.setattr(components, "_build_attention", lambda _, context, __: backend.TritonBackend(context))
    monkeypatch.setattr(components.TorchModelRunner, "warm_up", lambda _: None)
    monkeypatch.setattr(components, "check_finite", lambda _: None)
    monkeypatch.setattr(SharedMemory, "move", lambda _, arrays: map_arrays(arrays, torch.tensor))  # aligned
    path = find_model(EMBEDDED) if architecture == EMBEDDED else make_checkpoint(architecture, tmp_path, max_position_embeddings=4096)
    prepared = prepare(make_config(path))
    runner = build_rank(prepared.resolved, prepared.registry)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills `torch.empty` with the largest integers and NaN
    try:
        with compile_ahead():
            padding, limits = runner.inputs.table.padding_slot, runner.context.limits
            for batch in (*idle_decodes(padding), *idle_prompts(limits), *idle_mixed(padding, limits)):
                runner.launch(batch).wait()
            runner.capture_decode_graphs(8, is_dry=True)
            runner.capture_piecewise_graphs(32, is_dry=True)
            runner.sampler.warm_up(torch.zeros(2, runner.vocab_size, dtype=torch.bfloat16))
        started = len(compiler.names)
        loop = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)
        with compile_ahead():
            for count in (1, 3, 8):
                each = [{"temperature": row % 2, "top_k": row % 3 or -1, "max_tokens": 2 + row} for row in range(count)]
                params = [SamplingParams(**every, ignore_eos=True) for every in each]
                loop.generate([[7] * (1 + 37 * row + count) for row in range(count)], params)
    finally:
        torch.use_deterministic_algorithms(False)
    assert runner.decode_graphs is None
    assert runner.piecewise_graphs is None
    assert not compiler.launches
    assert {"decode_kernel", "extend_kernel"} <= set(compiler.names[:started])
    assert compiler.names[started:] == []
