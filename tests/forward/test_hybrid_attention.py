"""A pair of attention backends: the conformance cases hold for both together, each sees its own
rows alone, graphs are the decodes' own."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from frame.attention_backends import TORCH_NATIVE
from frame.attention_backends.torch_native.backend import TorchNativeBackend
from frame.core.engine import Engine, EngineOptions
from frame.core.errors import ConfigurationError
from frame.core.execution.model_runner import TorchModelRunner
from frame.core.interfaces.attention import AttentionBackend
from frame.core.interfaces.batch import AttentionOutput
from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.cache import PrefixCacheContext
from frame.core.interfaces.cache_groups import Capacity
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.runner import ModelRunner
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.transport import InProcessTransport
from frame.core.kv_cache.geometry import kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.core.messages import Control, Generate, StepTokens
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH, Sampler
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.entrypoints.processes.build_scheduler import assemble_scheduler
from frame.entrypoints.tools.bench.paged_batches import PlainKVCache, Rows, build_context, forward_batch, lay_out, planned
from frame.forward.hybrid_attention import HybridAttention
from frame.parallel.rank_channels import SwitchBackend
from frame.parallel.tp_follower import LeadingRunner, follow
from frame.plugins.eviction_policies.lru import Lru
from frame.plugins.prefix_caches.radix import RadixCache
from frame.plugins.scheduling_policies.fcfs import Fcfs
from frame.testing.attention import suite
from frame.testing.contexts import EVICTION, SCHEDULING
from frame.testing.page_allocators import make_allocator
from tests.core.fake_model import FakeAttention, FakeModel, continuation, fake_model_config

CASES = dict(suite.cases("cpu", False, TORCH_NATIVE))


def pair(case: suite.Case) -> HybridAttention:
    context = build_context(case.device, case.dtype, case.page_size)
    return HybridAttention(TorchNativeBackend(context), TorchNativeBackend(context))


@pytest.mark.parametrize("name", [name for name in CASES if "mixed" in name or "decodes" in name or "extends" in name])
def test_a_pair_computes_what_one_backend_does(name: str) -> None:
    suite.check_case(pair, CASES[name])


class Seen(AttentionBackend):
    """Notes the batches that it is given."""

    capabilities = TORCH_NATIVE

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.planned: list[Any] = []
        self.replayed: list[Any] = []

    def plan(self, batch: Any) -> str:
        self.planned.append(batch)
        return "plan"

    def capture_plan(self, batch: Any) -> str:
        return "captured"

    def replay_plan(self, plan: Any, batch: Any) -> None:
        self.replayed.append((plan, batch))

    def run(self, spec: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any) -> torch.Tensor:
        assert batch.plan in ("plan", "captured")
        assert q.shape[0] == k.shape[0] == v.shape[0] == batch.num_tokens
        return q


def batch_of(rows: Rows) -> Any:
    pages = lay_out(rows, 4, np.random.default_rng(0))
    return forward_batch(rows, pages, PlainKVCache(4, []), "cpu")


def seen_pair() -> tuple[HybridAttention, Seen, Seen]:
    context = build_context("cpu", torch.float32, 4)
    extends, decodes = Seen(context), Seen(context)
    return HybridAttention(extends, decodes), extends, decodes


def test_each_backend_sees_its_own_rows_as_if_there_were_no_others() -> None:
    both, extends, decodes = seen_pair()
    batch = planned(both, batch_of(Rows.of([5, 9], [(3, 6), (0, 2)])))
    (own,), (others,) = decodes.planned, extends.planned
    assert (own.num_decodes, own.num_rows, own.num_tokens) == (2, 2, 2)
    assert (others.num_decodes, others.num_rows, others.num_tokens) == (0, 2, 8)
    assert own.query_starts.tolist() == [0, 1, 2]
    assert others.query_starts.tolist() == [0, 6, 8]
    assert others.host.seq_lens.tolist() == others.seq_lens.tolist() == [9, 2]
    assert others.kv_slots.tolist() == batch.kv_slots.tolist()[2:]
    q = torch.randn(10, 2, 8)
    assert torch.equal(both.run(None, q, q, q, batch), q)  # type: ignore[arg-type]


def test_steps_of_one_kind_are_handed_over_whole() -> None:
    both, extends, decodes = seen_pair()
    for rows in (Rows.of([5, 9]), Rows.of([], [(0, 4)])):
        batch = batch_of(rows)
        q = torch.randn(batch.num_tokens, 2, 8)
        assert both.run(None, q, q, q, planned(both, batch)) is q  # type: ignore[arg-type]
    assert (len(decodes.planned), len(extends.planned)) == (1, 1)


def test_graphs_are_the_decode_backends() -> None:
    both, extends, decodes = seen_pair()
    batch, other = batch_of(Rows.of([5, 9])), batch_of(Rows.of([7, 2]))
    plan = both.capture_plan(batch)
    captured = replace(batch, plan=plan)
    q = torch.randn(2, 2, 8)
    assert both.run(None, q, q, q, captured) is q  # type: ignore[arg-type]
    both.replay_plan(plan, other)
    assert decodes.replayed == [("captured", other)]
    assert extends.planned == extends.replayed == []


@pytest.mark.parametrize("width", [8, 6])
def test_results_that_went_to_the_batches_own_place_are_not_joined_by_a_copy(width: int) -> None:
    class Writes(Seen):
        def run(self, spec: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any) -> torch.Tensor:
            return AttentionOutput.get_buffer(batch, q, 2, 8).copy_(q)

    context = build_context("cpu", torch.float32, 4)
    both = HybridAttention(Writes(context), Writes(context))
    own = torch.zeros(10, 2, width)
    batch = replace(batch_of(Rows.of([5, 9], [(3, 6), (0, 2)])), extensions={AttentionOutput: AttentionOutput(own)})
    batch = planned(both, batch)
    q = torch.randn(10, 2, 8)
    found = both.run(None, q, q, q, batch)  # type: ignore[arg-type]
    assert torch.equal(found, q)
    assert (found.data_ptr() == own.data_ptr()) == (width == 8)


class Compiling(Seen):
    """Compiles until `compiled` is set; then fails if `failure` says so."""

    capabilities = replace(TORCH_NATIVE, compiles_at_start=True, graphs="decode")

    def __init__(self, context: Any, failure: Exception | None = None, announces: bool = True) -> None:
        super().__init__(context)
        self.compiling, self.compiled = threading.Event(), threading.Event()
        self.layers: list[Any] = []
        self._failure = failure
        self._announces = announces

    def prepare(self, layers: Any, on_compile: Any = None) -> None:
        self.layers = list(layers)
        if self._announces:
            on_compile("two kernels")
            self.compiling.set()
            assert self.compiled.wait(30)
        if self._failure is not None:
            raise self._failure


class Ready(Seen):
    capabilities = replace(TORCH_NATIVE, graphs="decode")

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.prepared = 0

    def prepare(self, layers: Any, on_compile: Any = None) -> None:
        self.prepared += 1


def step(both: HybridAttention) -> None:
    batch = planned(both, batch_of(Rows.of([5, 9], [(3, 6), (0, 2)])))
    q = torch.randn(10, 2, 8)
    assert torch.equal(both.run(None, q, q, q, batch), q)  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", ["extends", "decodes"])
def test_the_other_backend_computes_all_rows_while_kernels_are_compiled(phase: str) -> None:
    context = build_context("cpu", torch.float32, 4)
    slow, ready = Compiling(context), Ready(context)
    both = HybridAttention(slow, ready) if phase == "extends" else HybridAttention(ready, slow)
    both.prepare(["layer"])  # type: ignore[list-item]
    assert both.preparation is not None and ready.prepared == 1
    both.preparation.wait_for_estimate()
    assert not slow.compiling.wait(0.01), "the start comes first"
    both.preparation.allow_compilation()
    assert slow.compiling.wait(30)
    step(both)
    old = both.capture_plan(batch_of(Rows.of([5, 9])))
    assert (len(ready.planned), len(slow.planned)) == (1, 0) and ready.planned[0].num_rows == 4
    assert not both.preparation.is_done and slow.layers == ["layer"]
    slow.compiled.set()
    both.preparation.wait()
    step(both)  # nothing changes between two steps by itself
    assert not slow.planned
    assert both.switch(is_ready=True) == (phase == "decodes")
    assert both.preparation is None
    step(both)
    assert len(slow.planned) == 1 and slow.planned[0].num_rows == 2
    other = batch_of(Rows.of([7, 2]))
    both.replay_plan(old, other)  # what was captured stays with the backend that it was captured with
    assert [plan for plan, _ in ready.replayed] == ["captured"]
    both.replay_plan(both.capture_plan(other), other)
    assert len((slow if phase == "decodes" else ready).replayed) == (1 if phase == "decodes" else 2)


def test_a_backend_that_cannot_be_prepared_is_never_used(caplog: pytest.LogCaptureFixture) -> None:
    context = build_context("cpu", torch.float32, 4)
    slow, ready = Compiling(context, ConfigurationError("no compiler")), Ready(context)
    both = HybridAttention(slow, ready)
    both.prepare([])
    slow.compiled.set()
    assert both.preparation is not None
    both.preparation.wait()
    assert not both.switch(is_ready=both.preparation.error is None)
    step(both)
    assert not slow.planned and "no compiler" in caplog.text


def test_what_no_other_backend_can_stand_in_for_is_prepared_first() -> None:
    context = build_context("cpu", torch.float32, 4)
    for other in (Compiling(context, announces=False), Seen(context)):  # compiles as well; has no graphs
        slow = Compiling(context, announces=False)
        both = HybridAttention(other, slow)
        both.prepare(["layer"])  # type: ignore[list-item]
        assert both.preparation is None and slow.layers == ["layer"]


class SlowFake(FakeAttention):
    """The fake model's backend, whose kernels are there when the test says so."""

    capabilities = replace(FakeAttention.capabilities, compiles_at_start=True)

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.compiled, self.planned = threading.Event(), 0

    def prepare(self, layers: Any, on_compile: Any = None) -> None:
        on_compile("a kernel")
        assert self.compiled.wait(30)

    def plan(self, batch: Any) -> Any:
        self.planned += 1
        return super().plan(batch)


@pytest.mark.parametrize("phase", ["extends", "decodes"])
def test_an_engine_switches_between_two_steps(phase: str) -> None:
    """Requests that are being computed go on with the tokens that they would have had."""
    vocab, count = 97, 60
    context = BuildContext(device=torch.device("cpu"), dtype=torch.float32, tp=LocalGroup(), limits=Limits(8, 64, 128, 4))
    slow, ready = SlowFake(context), FakeAttention(context)
    both = HybridAttention(slow, ready) if phase == "extends" else HybridAttention(ready, slow)
    context = replace(context, attention=both)
    model_config = fake_model_config(vocab, 128)
    pool = KVPool(kv_geometry(model_config, 1, 4, "float32"), 300, context.device)
    sampler = Sampler(Processors((), 8), TORCH)
    runner = TorchModelRunner(FakeModel(model_config, context), model_config, context, pool, sampler, Capacity(300, 4, 12))
    both.prepare([])
    runner.resolve_backend()
    assert not runner.can_switch_backend
    runner.capture_decode_graphs(4)
    runner.allow_compilation()
    captured = runner.decode_graphs
    config = SchedulerConfig(page_size=4, num_pages=300, max_running=8, token_budget=64, max_context=128, vocab_size=vocab, overlap=True)
    near, far = InProcessTransport.pair()
    cache = RadixCache(PrefixCacheContext(4, 300, Lru(EVICTION)))
    engine = Engine(assemble_scheduler(config, cache, make_allocator(300), Fcfs(SCHEDULING)), runner, far, EngineOptions(overlap=True))
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    prompts = {f"r{row}": [(7 * row + place) % vocab for place in range(3 + row * 5)] for row in range(6)}
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    for rid, prompt in prompts.items():
        near.send(Generate(rid=rid, token_ids=prompt, params=params))
    outputs: dict[str, list[int]] = {rid: [] for rid in prompts}
    ended: set[str] = set()
    while len(ended) < len(prompts):
        for message in near.receive(10.0):
            assert isinstance(message, StepTokens)
            for place, rid in enumerate(message.rids):
                outputs[rid] += message.token_ids[place]
            ended |= {message.rids[place] for place in message.finishes}
        if not slow.compiled.is_set() and min(map(len, outputs.values())) > 3:
            assert slow.planned == 0
            slow.compiled.set()
    near.send(Control(id="stop", action="shutdown"))
    thread.join(10)
    assert outputs == {rid: continuation(prompt, count, vocab) for rid, prompt in prompts.items()}
    assert slow.planned > 0
    assert (runner.decode_graphs is captured) == (phase == "extends"), "captured decodes of the other backend are captured anew"


def test_followers_switch_when_rank_0_does() -> None:
    orders: list[Any] = []

    class Inner(ModelRunner):
        can_switch_backend = True  # type: ignore[assignment]

        def __init__(self) -> None:
            self.switched = 0

        def launch(self, batch: Any) -> Any:
            raise AssertionError

        def switch_backend(self) -> None:
            self.switched += 1

        def close(self) -> None:
            pass

    sender: Any = SimpleNamespace(send_order=orders.append, close=lambda: orders.append(None))
    leading = LeadingRunner(Inner(), sender)
    assert leading.can_switch_backend
    leading.switch_backend()
    assert orders == [SwitchBackend()]
    follower = Inner()
    receiver: Any = SimpleNamespace(receive=lambda: orders.pop(0) if orders else None, close=lambda: None)
    follow(follower, receiver)
    assert follower.switched == 1
