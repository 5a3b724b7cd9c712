"""Simulates a plan on a machine: builds the replicas of a `DeploymentPlan`, and refuses what has no
model.

Used by `frame simulate` and `frame plan --hosts`. Opens no device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from frame.config.schema import FrameConfig
from frame.core.errors import ConfigError, ConfigurationError
from frame.core.interfaces.cache_groups import RESERVED_PAGES
from frame.entrypoints.tools.plan.machines import Machine, parse_machine
from frame.entrypoints.tools.plan.planner import DeploymentPlan, plan_deployment
from frame.entrypoints.tools.simulate.engine import VirtualEngine
from frame.entrypoints.tools.simulate.fleet import Fleet
from frame.entrypoints.tools.simulate.measures import Measures
from frame.entrypoints.tools.simulate.shares import DENSE, EXPERTS, SOURCES, PeakShares
from frame.entrypoints.tools.simulate.step_times import StepTimes
from frame.entrypoints.tools.simulate.workload import Arrival, Distribution
from frame.interfaces.routing import RoutingContext
from frame.plugins.loader import load_configured
from frame.plugins.registry import Registry

MAX_HOSTS = 1024


@dataclass(frozen=True, slots=True)
class Cluster:
    """`hosts` equal machines."""

    hosts: int
    machine: Machine

    @property
    def num_devices(self) -> int:
        return self.hosts * self.machine.count


def parse_cluster(text: str) -> Cluster:
    """The machines that `text` names, such as `4x8xh200`. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,4})x(\d{1,4}x.+)", text.strip().lower())
    if match is None:
        return Cluster(1, parse_machine(text))
    hosts = int(match[1])
    if not 1 <= hosts <= MAX_HOSTS:
        raise ConfigError(f"--machine is {text!r}; write 1 to {MAX_HOSTS} hosts, such as 4x8xh200")
    return Cluster(hosts, parse_machine(match[2]))


@dataclass(frozen=True)
class Simulation:
    """A plan that can be simulated, on a cluster. `replicas`: engines with ranks of their own."""

    plan: DeploymentPlan
    registry: Registry
    cluster: Cluster
    replicas: int
    policy: str
    seed: int

    @classmethod
    def build(
        cls, config: FrameConfig, cluster: Cluster, replicas: int | None = None, policy: str | None = None, seed: int = 0
    ) -> Simulation:
        """`replicas`: None: as many as the devices are enough for. Raises ConfigurationError for
        what is not modelled or does not fit."""
        plan = plan_deployment(config, cluster.machine)
        if refused := list(find_unmodelled(plan)):
            raise ConfigError(f"frame simulate does not model {', '.join(refused)}; leave it out, or measure with frame bench serve")
        parallel = plan.resolved.plan
        room = cluster.machine.count // parallel.num_ranks * cluster.hosts
        count = replicas or (parallel.num_replicas if parallel.num_replicas > 1 else room)
        if count > room:
            raise ConfigError(f"{count} replicas of {parallel.num_ranks} device(s) do not fit; --machine has room for {room}")
        registry = load_configured(config.plugins)
        if policy is None:
            policy = max((each for each in registry.records("routing_policy") if not each.problems), key=lambda each: each.rank).name
        return cls(plan, registry, cluster, count, policy, seed)

    def make_fleet(self, measures: Measures, replicas: int | None = None) -> Fleet:
        """The replicas, which fill `measures`."""
        resolved = self.plan.resolved
        times = StepTimes(self.plan, self.shares)
        pages = self.plan.memory.tokens // resolved.page_size + RESERVED_PAGES
        policy = self.registry.load(self.registry.get("routing_policy", self.policy))(RoutingContext(self.seed))
        return Fleet(lambda: VirtualEngine(resolved, self.registry, pages, times, measures), replicas or self.replicas, policy)

    def run(self, arrivals: Iterable[Arrival]) -> dict[str, Any]:
        """Serve the requests. -> a row of a report."""
        measures = Measures(self.shares.entry)
        fleet = self.make_fleet(measures)
        fleet.run(arrivals)
        memory = self.plan.memory
        figures = measures.describe(self.replicas)
        if not figures["output_tokens"]:
            raise ConfigurationError(f"no request was served: {'; '.join(figures['errors']) or 'there were none'}")
        return figures | {
            "replicas": self.replicas,
            "devices": self.replicas * self.plan.resolved.plan.num_ranks,
            "memory_bytes": memory.used,
            "memory_share": round(memory.used / memory.total, 4),
            "max_total_tokens": memory.tokens,
        }

    @property
    def shares(self) -> PeakShares:
        """Those of the model's kind."""
        return EXPERTS if self.plan.resolved.model.num_experts else DENSE

    def list_assumptions(self) -> Iterator[str]:
        """What is taken from other measurements than those of this model and machine."""
        model = self.plan.resolved.model
        yield f"shares of the peak rates are those of {SOURCES['experts' if model.num_experts else 'dense']}"
        if self.plan.card is not None and self.plan.card.name != "NVIDIA H200":
            yield f"no step was measured on {self.plan.card.name}: the shares of NVIDIA H200 are taken"
        if self.plan.resolved.choice("weight_format").name != "none":
            yield "no step with quantized weights was measured: the shares of bfloat16 are taken"
        if self.plan.resolved.plan.tp > 2:
            yield "sums over more than 2 ranks were not measured: the share of 2 ranks is taken"
        if self.plan.resolved.plan.ep > 1:
            yield "tokens are routed to all experts equally"


def find_unmodelled(plan: DeploymentPlan) -> Iterator[str]:
    """What of a plan has no step time here."""
    resolved = plan.resolved
    if resolved.task != "generate":
        yield f"the task {resolved.task}"
    if plan.card is None:
        yield "this machine, whose rates are unknown (name one with --machine)"
    if plan.cost is None:
        yield f"the operations of {resolved.served_name}"
    elif plan.cost.window is not None or plan.cost.state:
        yield "sliding windows and recurrent layers"
    if resolved.plan.num_groups > 1:
        yield "attention groups (parallel.dp_attention)"
    if resolved.plan.hosts > 1:
        yield "ranks on several hosts (parallel.nnodes), whose links were not measured"
    if resolved.plugins.get("drafter"):
        yield "speculation (speculative.algorithm)"
    if resolved.plugins.get("kv_tier"):
        yield "cache tiers (cache.tiers)"
    if resolved.user.disaggregation.mode is not None:
        yield "prefill and decode servers (disaggregation.mode)"


def describe(simulation: Simulation, machine: str, row: dict[str, Any]) -> dict[str, Any]:
    """The report of a run: equal for equal arguments."""
    resolved = simulation.plan.resolved
    return {
        "format": 1,
        "kind": "simulate",
        "machine": machine,
        "model": resolved.served_name,
        "parallel": str(resolved.plan),
        "policy": simulation.policy,
        "seed": simulation.seed,
        "assumptions": list(simulation.list_assumptions()),
        "rows": {"simulated": row},
    }


def rank_plans(config: FrameConfig, cluster: Cluster, distribution: Distribution) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """(plan, its figures, or why it cannot be simulated) of every division of a host's devices into
    tensor-parallel ranks and stages."""
    sizes = [1 << power for power in range(cluster.machine.count.bit_length())]
    for tp in sizes:
        for pp in (size for size in sizes if tp * size <= cluster.machine.count):
            parallel = config.parallel.model_copy(update={"tp": tp, "pp": pp, "ep": tp if config.parallel.ep > 1 else 1})
            name = f"--tp {tp} --pp {pp}"
            try:
                simulation = Simulation.build(config.model_copy(update={"parallel": parallel}), cluster)
                yield name, simulation.run(distribution.draw(simulation.plan.resolved.model.vocab_size, 0))
            except ConfigurationError as error:
                yield name, str(error).splitlines()[0]
