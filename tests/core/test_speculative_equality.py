"""Whole engines with drafts draw the tokens of engines without: scheduler and runner over small
checkpoints on the CPU, in float32.

The grid here is small; `test_many_requests` is the large one, behind the marker soak.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.config.resolution.drafter import MAX_PADDING
from frame.config.schema import FrameConfig
from frame.core.errors import ConfigurationError
from frame.core.interfaces.batch import ScheduledBatch
from frame.core.interfaces.drafter import TreeShape
from frame.core.interfaces.sampling import GrammarContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.plugins.loader import load_registry
from frame.structured_output import grammar_calls
from frame.structured_output.draft_masks import fill_draft_masks
from frame.testing.checkpoints import make_checkpoint
from frame.testing.drafters import Script, ScriptedDrafter, ScriptedTreeDrafter, TreeScript
from frame.testing.local_loop import LocalLoop
from frame.text.tokenizer import Tokenizer
from tests.core.greedy import Case, on_two_ranks

FOLDER = str(find_model(EMBEDDED))


def make_loop(**settings: Any) -> LocalLoop:
    """settings: page_size, tokens, chunk, overlap, running, algorithm, adaptive, path and draft
    (folders), synthetic, kv_dtype, topk and nodes (of trees)."""
    known = {"page_size": 16, "tokens": 16 * 1024, "chunk": 512, "overlap": False, "algorithm": None, "adaptive": False}
    known |= {"running": 16, "path": FOLDER, "draft": None, "synthetic": None, "kv_dtype": "auto", "topk": 1, "nodes": None, **settings}
    config = {
        "model": {"path": known["path"], "dtype": "float32"},
        "cache": {"page_size": known["page_size"], "kv_dtype": known["kv_dtype"], "max_total_tokens": known["tokens"]},
        "scheduler": {"max_running_requests": known["running"], "chunked_prefill_size": known["chunk"], "overlap": known["overlap"]},
        "execution": {"device": "cpu", "threads": 1},
        "speculative": {
            "algorithm": known["algorithm"],
            "adaptive": known["adaptive"],
            "draft_model_path": known["draft"],
            "synthetic_acceptance_length": known["synthetic"],
        },
    }
    if known["topk"] > 1:
        options = {"eagle_topk": known["topk"], "num_draft_tokens": known["nodes"]}
        config["plugins"] = {"options": {f"drafter/{known['algorithm']}": options}}
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)


def make_requests(count: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, some of which repeat themselves or share a prefix, and parameters of all kinds."""
    numbers = random.Random(seed)
    stem = [numbers.randrange(6, 384) for _ in range(40)]
    prompts, params = [], []
    for number in range(count):
        prompt = [numbers.randrange(6, 384) for _ in range(numbers.randint(2, 30))]
        prompts.append((stem if number % 3 == 0 else []) + prompt * (1 + number % 3))
        maximum = 64 if number % 4 == 3 else numbers.randint(3, 32)
        more: dict[str, Any] = {"temperature": (0.0, 0.7, 1.0)[number % 3], "seed": number, "max_tokens": maximum}
        if number % 4 == 1:
            more |= {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 3}
        if number % 5 == 2:
            more |= {"top_p": 0.9, "top_k": 20}
        if number % 7 == 3:
            more |= {"stop_token_ids": tuple(range(100, 140))}
        params.append(SamplingParams(ignore_eos=number % 2 == 0, **more))
    return prompts, params


@pytest.fixture(scope="module")
def expected() -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    prompts, params = make_requests(14)
    return prompts, params, make_loop().generate(prompts, params)


GRID = {
    "plain": {},
    "single-token pages": {"page_size": 1},
    "chunks": {"chunk": 16},
    "overlap": {"overlap": True, "adaptive": True},
    "preemption": {"tokens": 160, "chunk": 64, "overlap": True},
}


ON_DEVICE = {"mtp": {}, "draft_model": {"draft": FOLDER}}
QUICK = {("mtp", "preemption"), ("draft_model", "single-token pages")}  # the others of the device drafters run in `soak`
CASES = [("ngram", name) for name in GRID] + [
    pytest.param(each, name, marks=() if (each, name) in QUICK else pytest.mark.soak) for each in ON_DEVICE for name in GRID
]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "name"), CASES)
def test_grid(expected: Any, algorithm: str, name: str) -> None:
    prompts, params, outputs = expected
    settings = GRID[name] | ON_DEVICE.get(algorithm, {})
    loop = make_loop(algorithm=algorithm, **settings)
    assert loop.generate(prompts, params) == outputs
    load = loop.scheduler.get_load()
    assert load["accepted_tokens"] > 0
    # requests that end sooner may fit without
    assert load["preempted"] > 0 or "tokens" not in settings or algorithm == "draft_model"
    loop.scheduler.check_integrity()
    loop.scheduler.flush_cache()
    assert loop.scheduler.get_load()["used_pages"] == 0


def test_suffix(expected: Any) -> None:
    """The second pass drafts from the texts of the first."""
    prompts, params, outputs = expected
    loop = make_loop(algorithm="suffix", overlap=True)
    accepted = []
    for _ in range(2):
        assert loop.generate(prompts, params) == outputs
        accepted.append(loop.scheduler.get_load()["accepted_tokens"])
    assert accepted[1] > 3 * accepted[0] > 0


@pytest.mark.parametrize(("architecture", "seed"), [("Qwen3NextForCausalLM", 0), ("FalconH1ForCausalLM", 3)])
def test_recurrent_states(architecture: str, seed: int, tmp_path: Path) -> None:
    """States after rejected drafts, and prefixes whose states were saved between drafts. `seed`: of
    a model that repeats itself."""
    path = str(make_checkpoint(architecture, tmp_path, seed))
    numbers = random.Random(3)
    prompts = [[numbers.randrange(6, 384) for _ in range(7)] * times for times in (1, 5, 9)]
    params = [SamplingParams(temperature=temperature, seed=1, max_tokens=70, ignore_eos=True) for temperature in (0.0, 0.0, 0.8)]
    outputs = make_loop(path=path).generate(prompts, params)
    loop = make_loop(path=path, algorithm="ngram", overlap=True, chunk=48)
    assert loop.generate(prompts, params) == outputs
    again = [prompt + output[:64] for prompt, output in zip(prompts, outputs, strict=True)]
    rest = [structs.replace(each, max_tokens=6) for each in params]
    assert loop.generate(again, rest) == [output[64:] for output in outputs]
    load = loop.scheduler.get_load()
    assert load["drafted_tokens"] > load["accepted_tokens"] > 0
    assert loop.stats["cached"] >= 64
    loop.scheduler.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ngram", "draft_model"])
def test_thinking_budgets(algorithm: str) -> None:
    """The closing token is forced at the same place, also within a draft."""
    prompts, _ = make_requests(6)
    params = []
    for number in range(6):
        sampling: dict[str, Any] = {"temperature": (0.0, 0.7)[number % 2], "seed": number, "max_tokens": 64, "ignore_eos": True}
        params.append(SamplingParams(thinking_token_budget=1 + 3 * number, thinking_end_id=300, **sampling))
    outputs = make_loop().generate(prompts, params)
    for number, output in enumerate(outputs):
        assert 300 in output[: 2 + 3 * number], number
    loop = make_loop(algorithm=algorithm, overlap=True, draft=FOLDER if algorithm == "draft_model" else None)
    assert loop.generate(prompts, params) == outputs
    assert loop.scheduler.get_load()["accepted_tokens"] > 0


def test_model_that_drafts_for_itself_is_always_right() -> None:
    """Also where tokens are drawn, since drafts are drawn with the keys of their positions."""
    prompts, _ = make_requests(6)
    params = [SamplingParams(temperature=(0.0, 0.7, 1.0)[number % 3], seed=number, max_tokens=17, ignore_eos=True) for number in range(6)]
    loop = make_loop(algorithm="draft_model", draft=FOLDER, chunk=32)
    loop.generate(prompts, params)
    load = loop.scheduler.get_load()
    assert load["drafted_tokens"] == load["accepted_tokens"] == 6 * 12  # 1 + 4 * (3 + 1) tokens


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "FalconH1ForCausalLM"])
def test_draft_model_with_another_attention(architecture: str, tmp_path: Path) -> None:
    """The draft model has heads, and the target a latent, or a state in each layer besides."""
    target, draft = (str(make_checkpoint(name, tmp_path / name)) for name in (architecture, "LlamaForCausalLM"))
    prompts, params = make_requests(5)
    outputs = [make_loop(path=target, algorithm=each, draft=each and draft).generate(prompts, params) for each in (None, "draft_model")]
    assert outputs[0] == outputs[1]


def test_draft_model_with_another_vocabulary(tmp_path: Path) -> None:
    assert MAX_PADDING < 2048 - 384
    with pytest.raises(ConfigurationError, match=r"speculative.draft_model_path has a vocabulary of 384 tokens"):
        make_loop(algorithm="draft_model", draft=str(make_checkpoint("LlamaForCausalLM", tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "overlap"), [("ngram", False), ("mtp", False), ("mtp", True)])
def test_grammars(algorithm: str, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with and without a grammar; with overlap, two run at a time, a grammar arrives while
    drafts are in flight, and some masks cannot be filled."""
    pytest.importorskip("llguidance")
    registry, tokenizer = load_registry(installed=False), Tokenizer.load(FOLDER)
    backend = registry.load(registry.get("grammar_backend", "llguidance"))(GrammarContext(tokenizer, 2048))
    sources = ("(foo|bar|[a-c]{2,5})( (foo|bar|[a-c]{2,5})){3,12}", "[0-9]{30}", None)
    compiled = [backend.compile("regex", source) if source else None for source in sources]
    prompts = [[*tokenizer.encode("foo bar aab foo bar aab 000000000"), 6 + number] for number in range(6)]
    params = [SamplingParams(temperature=(0.0, 0.7, 1.0)[number // 2], seed=number, max_tokens=32) for number in range(6)]
    compiled, outputs, num_late, num_filled = compiled * 2, [], 0, 0

    def fill_some(*args: Any) -> tuple[int, bool]:
        nonlocal num_filled
        found, num_filled = fill_draft_masks(*args), num_filled + 1
        return found if num_filled % 5 else (0, False)

    if overlap:
        monkeypatch.setattr(grammar_calls, "fill_draft_masks", fill_some)
        compiled.sort(key=lambda each: each is not None)
        params = [structs.replace(each, max_tokens=16 + 9 * i, frequency_penalty=0.3 * (i % 2)) for i, each in enumerate(params)]
    for each in (None, algorithm):
        loop = make_loop(algorithm=each, overlap=overlap, running=2 if overlap else 16)
        started = (None if one is None else one.start() for one in compiled)
        add, launch = loop.scheduler.add_request, loop.runner.launch
        loop.scheduler.add_request = lambda message, add=add, started=started: add(message, next(started))  # type: ignore[method-assign]

        def watched(batch: ScheduledBatch, launch: Any = launch) -> Any:
            nonlocal num_late
            num_late += batch.has_deferred_grammar_mask and batch.num_drafts is not None and batch.num_drafts.all()
            return launch(batch)

        loop.runner.launch = watched  # type: ignore[method-assign]
        outputs.append(loop.generate(prompts, params))
    assert outputs[0] == outputs[1] and (num_late > 5) == overlap
    assert loop.scheduler.get_load()["accepted_tokens"] > 10


def with_drafts(expected: Any, num_right: int, **settings: Any) -> LocalLoop:
    """A loop whose drafts are right for `num_right` tokens, then wrong."""
    loop = make_loop(**settings)
    loop.scheduler.speculation.enable(ScriptedDrafter(make_script(expected, num_right)), 5)
    return loop


def make_script(expected: Any, num_right: int) -> Script:
    """Drafts that are right for `num_right` tokens."""
    prompts, _, outputs = expected
    whole = {tuple(prompt): prompt + output for prompt, output in zip(prompts, outputs, strict=True)}

    def script(setup: Any, given: Any, maximum: int) -> list[int]:
        draft = whole[tuple(setup.token_ids[: setup.prompt_len].tolist())][len(given) : len(given) + maximum]
        return [token if i < num_right else (token + 1) % 384 for i, token in enumerate(draft)]

    return script


@pytest.mark.slow
@pytest.mark.parametrize("num_right", [0, 2])
def test_oracle_and_adversary(expected: Any, num_right: int) -> None:
    prompts, params, outputs = expected
    loop = with_drafts(expected, num_right, tokens=512, overlap=True)
    for _ in range(2):  # the second time prompts come from the prefix cache
        assert loop.generate(prompts, params) == outputs
    assert loop.stats["cached"] > 0
    loop.scheduler.check_integrity()
    loop.scheduler.flush_cache()
    assert loop.scheduler.get_load()["used_pages"] == 0


def make_tree_script(expected: Any) -> TreeScript:
    """Trees in which the right tokens come after wrong siblings, with wrong tokens below some."""
    prompts, _, outputs = expected
    whole = {tuple(prompt): prompt + output for prompt, output in zip(prompts, outputs, strict=True)}

    def script(setup: Any, given: Any, maximum: int) -> tuple[list[int], list[int]]:
        coming = whole[tuple(setup.token_ids[: setup.prompt_len].tolist())][len(given) :]
        numbers, tokens, parents, right = random.Random(len(given)), [], [], [0]  # right: the nodes of the right path
        while len(tokens) < min(maximum, numbers.randint(1, 8)):
            if len(right) <= len(coming) and numbers.random() < 0.5:
                parents.append(right[-1])
                tokens.append(coming[len(right) - 1])
                right.append(len(tokens))
            else:
                parents.append(numbers.randint(0, len(tokens)))
                known = coming[right.index(parents[-1])] if parents[-1] in right[: len(coming)] else 5
                tokens.append((known + 1 + len(tokens)) % 384)
        return tokens, parents

    return script


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"tokens": 160, "chunk": 64, "overlap": True}, {"page_size": 1}])
def test_trees(expected: Any, settings: dict[str, Any]) -> None:
    """Also with logits processors, preemption, and prompts from the prefix cache, whose keys were
    moved."""
    prompts, params, outputs = expected
    loop = make_loop(**settings)
    loop.scheduler.speculation.enable(ScriptedTreeDrafter(make_tree_script(expected)), 8, tree=TreeShape(2, 4, 8))
    assert loop.generate(prompts, params) == outputs
    load = loop.scheduler.get_load()
    assert load["drafted_tokens"] > load["accepted_tokens"] > 50
    again = [prompt + output[:-1] for prompt, output in zip(prompts, outputs, strict=True)]
    rest = [structs.replace(each, max_tokens=1, frequency_penalty=0.0, repetition_penalty=1.0, min_tokens=0) for each in params]
    hits = loop.generate(again, rest)
    assert loop.stats["cached"] > 0
    assert hits == make_loop(**settings).generate(again, rest)
    loop.scheduler.check_integrity()
    loop.scheduler.flush_cache()
    assert loop.scheduler.get_load()["used_pages"] == 0


@pytest.mark.slow
def test_trees_of_a_device_drafter(expected: Any) -> None:
    """Trees of the depth of the chains find more tokens, and their steps overlap."""
    prompts, params, outputs = expected
    preemption = {"topk": 2, "tokens": 160, "chunk": 64, "overlap": True}
    found = []
    for form in ({}, preemption, {"topk": 3, "nodes": 15, "page_size": 1, "adaptive": True, "overlap": True}):
        loop, num_late = make_loop(algorithm="mtp", **form), 0
        launch = loop.runner.launch

        def watched(batch: ScheduledBatch, launch: Any = launch) -> Any:
            nonlocal num_late
            num_late += batch.num_drafts is not None and batch.num_pending is not None and batch.num_pending.any()
            return launch(batch)

        loop.runner.launch = watched  # type: ignore[method-assign]
        assert loop.generate(prompts, params) == outputs
        assert (num_late > 15) == ("overlap" in form)
        load = loop.scheduler.get_load()
        assert load["preempted"] > 0 or "tokens" not in form
        found.append(load["accepted_tokens"] / load["num_drafts"])
        loop.scheduler.check_integrity()
        loop.scheduler.flush_cache()
        assert loop.scheduler.get_load()["used_pages"] == 0
    assert found[2] > found[1] > 1.1 * found[0]


@pytest.mark.parametrize(("name", "kv_dtype"), [("DeepseekV3ForCausalLM", "auto"), ("LlamaForCausalLM", "int8")])
def test_trees_of_latents_and_rounded_keys(tmp_path: Path, name: str, kv_dtype: str) -> None:
    path = str(make_checkpoint(name, tmp_path))
    prompts, params = make_requests(5)
    params = [structs.replace(each, logprobs=2 if number % 2 else None) for number, each in enumerate(params)]
    replies: list[Any] = []
    for _ in range(2):
        loop, logprobs = make_loop(path=path, kv_dtype=kv_dtype), {}
        if replies:
            drafter = ScriptedTreeDrafter(make_tree_script((prompts, params, replies[0][0])))
            loop.scheduler.speculation.enable(drafter, 8, tree=TreeShape(2, 4, 8))

        def watched(batch: Any, result: Any, commit: Any = loop.scheduler.commit, logprobs: Any = logprobs) -> Any:
            tokens = commit(batch, result)
            for i, found in tokens.logprobs.items():
                logprobs.setdefault(tokens.rids[i], []).extend(zip(found.token_ids, found.logprobs, strict=True))
            return tokens

        loop.scheduler.commit = watched  # type: ignore[method-assign]
        replies.append((loop.generate(prompts, params), logprobs))
    assert replies[0][0] == replies[1][0] and loop.scheduler.get_load()["accepted_tokens"] > 10
    assert len(logprobs) == 2
    for rid, pairs in logprobs.items():
        for one, other in zip(pairs, replies[0][1][rid], strict=True):
            assert one == pytest.approx(other, abs=1e-3)


def test_trees_end_the_use_of_a_drafter_where_chains_alone_are_verified(expected: Any, caplog: pytest.LogCaptureFixture) -> None:
    prompts, params, outputs = expected
    loop = make_loop()
    loop.scheduler.speculation.enable(ScriptedTreeDrafter(make_tree_script(expected)), 8)
    assert loop.generate(prompts[:2], params[:2]) == outputs[:2]
    assert "it drafted a tree, and this engine verifies chains alone" in caplog.text


@pytest.mark.slow
def test_two_ranks(expected: Any) -> None:
    """The other rank gets the drafts with the batch."""
    prompts, params, outputs = expected

    def generate(loop: LocalLoop) -> list[list[int]]:
        loop.scheduler.speculation.enable(ScriptedDrafter(make_script(expected, 2)), 5)
        return loop.generate(prompts, params)

    assert on_two_ranks(Case(FOLDER, prompts, None), generate, chunk=64, tokens=512) == outputs


@pytest.mark.slow
def test_trees_of_fewer_tokens_than_passes(expected: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A step that drafts one or two tokens has the keys of as many draws."""
    prompts, params, outputs = expected
    drawn = [number for number, each in enumerate(params) if each.temperature][:3]
    loop = make_loop(algorithm="mtp", topk=2, adaptive=True)
    for length in (1, 2):
        monkeypatch.setattr(loop.scheduler.speculation._lengths, "choose", lambda _, length=length: length)
        assert loop.generate([prompts[i] for i in drawn], [params[i] for i in drawn]) == [outputs[i] for i in drawn]
    assert loop.scheduler.get_load()["accepted_tokens"] > 0 and "not used any more" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_two_ranks_draft_on_their_devices(expected: Any, topk: int) -> None:
    prompts, params, outputs = expected

    def generate(loop: LocalLoop) -> tuple[list[list[int]], int]:
        return loop.generate(prompts[:6], params[:6]), loop.scheduler.get_load()["accepted_tokens"]

    settings = {"algorithm": "mtp", "adaptive": False}
    plugins = {"options": {"drafter/mtp": {"eagle_topk": topk}}}
    found, accepted = on_two_ranks(Case(FOLDER, prompts, None), generate, chunk=64, tokens=512, speculative=settings, plugins=plugins)
    assert found == outputs[:6] and accepted > 20
