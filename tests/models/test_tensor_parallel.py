"""Two (and four) ranks give the logits of one, with heads, experts and vocabulary split; in
threads, and once over gloo between processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.core.errors import ConfigurationError
from tests.models.harness import open_session
from tests.models.ranks import on_ranks
from tests.models.test_logits import ARCHITECTURES, NEWER, check, prompt


class Both:
    """A session on every rank, driven as one; checks that the ranks agree bit by bit."""

    def __init__(self, folder: Path, size: int, **names: Any) -> None:
        self.folder, self.size, self.names = folder, size, names
        self.plan: list[Any] = []

    def run(self, plan: list[Any]) -> list[list[torch.Tensor]]:
        def act(group: Any) -> list[list[torch.Tensor]]:
            session = open_session(self.folder, group, **self.names)
            return [session.step(rows) for rows in plan]

        ranks = on_ranks(self.size, act)
        for other in ranks[1:]:
            for mine, theirs in zip(ranks[0], other, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        return ranks[0]


ROOT = Path(__file__).resolve().parents[2]
PLAN = [[(0, prompt(30, 1))], [(0, prompt(1, 2)), (1, prompt(11, 3))], [(0, prompt(1, 4)), (1, prompt(5, 5))]]


# of the newer ones, those that split what no older one does; the others run in `soak`
SPLIT = (
    "CohereForCausalLM", "FalconH1ForCausalLM", "GptOssForCausalLM", "KimiLinearForCausalLM", "NemotronHForCausalLM", "Olmo2ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)  # fmt: skip
CASES = [*ARCHITECTURES, *SPLIT, *(pytest.param(name, marks=pytest.mark.soak) for name in NEWER if name not in SPLIT)]


@pytest.mark.parametrize("architecture", CASES)
def test_two_ranks_give_the_logits_of_one(architecture: str, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(architecture)
    alone = open_session(folder)
    want = [alone.step(rows) for rows in PLAN]
    for mine, theirs in zip(Both(folder, 2).run(PLAN), want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM"])
def test_a_layer_sums_twice_over_the_ranks(architecture: str, checkpoint: Callable[..., Path]) -> None:
    """Once after attention and once after the experts, routed and shared ones together; and the
    embeddings."""
    folder = checkpoint(architecture)

    def act(group: Any) -> tuple[int, int]:
        session, sums, reduce = open_session(folder, group), [], group.all_reduce
        group.all_reduce = lambda x: (sums.append(x), reduce(x))[1]
        session.step(PLAN[0])
        return len(sums), len(session.model.layers)

    for count, layers in on_ranks(2, act):
        assert count == 2 * layers + 1


@pytest.mark.parametrize("overrides", [{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "vocab_size": 383}])
def test_four_ranks_replicate_two_kv_heads(overrides: dict[str, Any], checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("LlamaForCausalLM", **overrides)
    alone = open_session(folder)
    plan = [[(0, prompt(20, 1))], [(0, prompt(1, 2))]]
    want = [alone.step(rows) for rows in plan]
    for mine, theirs in zip(Both(folder, 4).run(plan), want, strict=True):
        torch.testing.assert_close(mine[0], theirs[0], atol=1e-4, rtol=1e-4)
        assert mine[0].shape[-1] == overrides.get("vocab_size", 384)


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Qwen2MoeForCausalLM"])
def test_dummy_weights_do_not_depend_on_the_ranks(architecture: str, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(architecture)
    plan = [[(0, prompt(20, 1))]]
    want = open_session(folder, load_format="dummy").step(plan[0])[0]
    assert want.isfinite().all()
    assert want.std() > 0.5
    torch.testing.assert_close(Both(folder, 2, load_format="dummy").run(plan)[0][0], want, atol=1e-4, rtol=1e-4)


def test_mamba_groups_under_a_norm_cannot_be_replicated(checkpoint: Callable[..., Path]) -> None:
    """The norm of a group covers all of its heads; two groups are split."""
    for groups, refused in ((1, True), (2, False)):
        folder = checkpoint("FalconH1ForCausalLM", mamba_rms_norm=True, mamba_n_groups=groups)
        if refused:
            with pytest.raises(ConfigurationError, match="1 Mamba groups cannot be split into 2 equal parts"):
                Both(folder, 2).run(PLAN)
            continue
        for mine, theirs in zip(Both(folder, 2).run(PLAN), map(open_session(folder).step, PLAN), strict=True):
            torch.testing.assert_close(torch.cat(mine), torch.cat(theirs), atol=1e-4, rtol=1e-4)


def test_heads_that_cannot_be_split_are_refused(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("LlamaForCausalLM")
    with pytest.raises(
        ConfigurationError, match=r"4 attention heads cannot be split into 3 equal parts: set parallel.tp to a divisor of 4"
    ):
        Both(folder, 3).run([[(0, prompt(3))]])


RANK = """
import sys, torch
from pathlib import Path
from tests.plugins.test_collectives import join
from tests.models.harness import open_session
from tests.models.test_tensor_parallel import PLAN
torch.set_num_threads(1)
rank, meeting, folder, out = int(sys.argv[1]), *map(Path, sys.argv[2:])
group = join(rank, 2, meeting, timeout=60)
session = open_session(folder, group)
steps = [torch.cat(session.step(rows)) for rows in PLAN]
torch.save(torch.cat(steps), out / f"{rank}.pt")
group.close()
"""


@pytest.mark.slow
def test_two_processes_over_gloo(tmp_path: Path, checkpoint: Callable[..., Path], reference: Callable[[Path], Any]) -> None:
    folder = checkpoint("DeepseekV3ForCausalLM")
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, rank, tmp_path, folder, tmp_path], stderr=subprocess.PIPE, cwd=ROOT) for rank in "01"
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors.decode()
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert torch.equal(first, second)
    alone = open_session(folder)
    torch.testing.assert_close(first, torch.cat([torch.cat(alone.step(rows)) for rows in PLAN]), atol=1e-4, rtol=1e-4)


def test_all_steps_of_the_plan_on_two_ranks_equal_transformers(checkpoint: Callable[..., Path], reference: Callable[[Path], Any]) -> None:
    folder = checkpoint("Qwen3ForCausalLM")

    class Pair:
        """`check` drives one session; here each step is replayed on both ranks."""

        def __init__(self) -> None:
            self.plan: list[Any] = []

        def step(self, rows: Any) -> list[torch.Tensor]:
            self.plan.append(rows)
            return Both(folder, 2).run(self.plan)[-1]

    check(Pair(), reference(folder))  # type: ignore[arg-type]
