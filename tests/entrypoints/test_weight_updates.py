"""Weights that change while an engine serves: afterwards it equals one that was started on them."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from frame import Engine, SamplingParams
from frame.checkpoint.model_config import find_model
from frame.entrypoints.offline.engine import EngineError
from frame.testing.checkpoints import make_checkpoint
from tests.entrypoints.serving import RunningServer, open_engines, wait_until
from tests.models.test_reloading import change

KEYS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_total_tokens": 4096, "threads": 1, "page_size": 4}
PROMPTS = [list(range(start, start + 40)) for start in (10, 60, 110)]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, ignore_eos=True)
LONG = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints of one model."""
    folder = tmp_path_factory.mktemp("versions")
    return [make_checkpoint("Qwen3ForCausalLM", folder / f"v{seed}", seed) for seed in range(3)]


def outputs_of(engine: Engine) -> list[tuple[list[int], list[float | None]]]:
    """Tokens and their log-probabilities, of one prompt after another: the bits of rows depend on
    the others of their step."""
    outputs = (engine.generate(prompt, PARAMS) for prompt in PROMPTS)
    return [(output.token_ids, output.logprobs.logprobs) for output in outputs]


@pytest.fixture(scope="module")
def fresh(folders: list[Path]) -> Iterator[list[Engine]]:
    """An engine for each checkpoint."""
    with open_engines(folders, **KEYS) as engines:
        yield engines


@pytest.fixture(scope="module")
def expected(fresh: list[Engine]) -> list[Any]:
    found = [outputs_of(engine) for engine in fresh]
    assert found[0] != found[1] != found[2] != found[0]
    return found


@pytest.fixture
def engine(folders: list[Path]) -> Iterator[Engine]:
    with Engine(str(folders[0]), **KEYS) as running:
        yield running


@pytest.mark.slow
def test_a_repeated_prompt_over_ten_versions(engine: Engine, folders: list[Path], expected: list[Any]) -> None:
    """No cached prefix of an older version is read, and those of a version are."""
    assert outputs_of(engine) == expected[0]
    for number, index in zip(range(10), itertools.cycle((1, 2, 0)), strict=False):
        engine.update_weights(folders[index], f"step-{number}")
        assert engine.control("server_info")["weight_version"] == f"step-{number}"
        before = engine.control("server_info")["cached_tokens"]
        assert outputs_of(engine) == expected[index]
        assert engine.control("server_info")["cached_tokens"] == before
        assert [tokens for tokens, _ in outputs_of(engine)] == [tokens for tokens, _ in expected[index]]
        assert engine.control("server_info")["cached_tokens"] > before
    engine.control("check_integrity")


@pytest.mark.slow
def test_tiers_do_not_serve_older_weights(folders: list[Path], expected: list[Any]) -> None:
    """A pool of two prompts, so that others are read from the tier."""
    options = {"kv_tier/host": {"size_gib": 0.05}}
    small = KEYS | {"max_total_tokens": 128, "max_model_len": 128, "max_running_requests": 1, "cache_tiers": ["host"], "min_load_tokens": 4}
    with Engine(str(folders[0]), **small, plugins_options=options) as engine:
        for step, number in enumerate((0, 1, 0)):
            if step:
                engine.update_weights(folders[number], f"step-{step}")
            before = engine.control("server_info")["cached_tokens"]
            assert [tokens for tokens, _ in outputs_of(engine)] == [tokens for tokens, _ in expected[number]]
            assert engine.control("server_info")["cached_tokens"] == before, "nothing of other weights is read"
            assert [tokens for tokens, _ in outputs_of(engine)] == [tokens for tokens, _ in expected[number]]
            assert engine.control("server_info")["cached_tokens"] > before
        engine.control("check_integrity")


@pytest.mark.slow
def test_streams_go_on_with_the_new_weights(engine: Engine, fresh: list[Engine], folders: list[Path]) -> None:
    """Each continues as a fresh engine would after the prompt and the tokens of the old weights."""
    old = [output.token_ids for output in fresh[0].generate(PROMPTS, LONG)]
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    is_updated = False
    for delta in engine.stream(PROMPTS, LONG):
        tokens[delta.index] += delta.token_ids
        if not is_updated and all(len(each) > 3 for each in tokens):
            engine.update_weights(folders[1])
            is_updated = True
    assert is_updated and engine.control("server_info")["weight_version"] == "v1"
    assert engine.control("server_info")["preempted"] >= len(PROMPTS)
    for prompt, found, before in zip(PROMPTS, tokens, old, strict=True):
        assert len(found) == LONG.max_tokens and found != before
        shared = next(place for place, pair in enumerate(zip(found, before, strict=True)) if pair[0] != pair[1])
        assert shared > 3

        def rest(kept: int, prompt: list[int] = prompt, found: list[int] = found) -> list[int]:
            params = SamplingParams(max_tokens=len(found) - kept, temperature=0.0, ignore_eos=True)
            output: list[int] = fresh[1].generate(prompt + found[:kept], params).token_ids
            return output

        assert any(rest(kept) == found[kept:] for kept in range(shared, 3, -1))


def rewrite(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> Path:
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    save_file(dict(change(load_file(file))), file, {"format": "pt"})
    return target


NORM = "model.norm.weight"
PROJECTION = "model.layers.1.mlp.down_proj.weight"
WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]], str]] = {
    "missing": (lambda tensors: {name: tensor for name, tensor in tensors.items() if name != PROJECTION}, f"lacks {PROJECTION}"),
    "unknown": (
        lambda tensors: {**tensors, "model.other.weight": tensors[NORM].clone()},
        "holds model.other.weight, which the model does not",
    ),
    "shape": (lambda tensors: {**tensors, PROJECTION: tensors[PROJECTION][:, :-1].contiguous()}, f"{PROJECTION} has the shape"),
    "type": (lambda tensors: {**tensors, PROJECTION: tensors[PROJECTION].to(torch.int8)}, f"{PROJECTION} is stored as int8"),
    "type of one value": (lambda tensors: {**tensors, NORM: tensors[NORM].to(torch.float8_e4m3fn)}, f"{NORM} is stored as float8"),
}


def test_wrong_checkpoints_leave_the_old_weights(engine: Engine, folders: list[Path], expected: list[Any], tmp_path: Path) -> None:
    """The fault is found before the first write, and before any request is preempted."""
    for name, (alter, sentence) in WRONG.items():
        with pytest.raises(EngineError, match=sentence):
            engine.update_weights(rewrite(folders[1], tmp_path / name, alter), "wrong")
    other = make_checkpoint("LlamaForCausalLM", tmp_path / "llama")
    with pytest.raises(EngineError, match="has the architecture LlamaForCausalLM, and this engine runs Qwen3ForCausalLM"):
        engine.update_weights(other)
    with pytest.raises(EngineError, match="model_path '/nowhere' is no folder"):
        engine.update_weights("/nowhere")
    assert outputs_of(engine) == expected[0]
    info = engine.control("server_info")
    assert (info["weight_version"], info["preempted"]) == ("default", 0)
    engine.update_weights(folders[1])
    assert outputs_of(engine) == expected[1]


def test_a_file_that_breaks_while_it_is_read_ends_the_engine(
    engine: Engine, folders: list[Path], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are a mixture then. The engine starts again with those of before."""
    from frame.models.layers.parameter import ShardedParameter

    engine.update_weights(folders[1], "good")
    load = ShardedParameter.load

    def break_off(parameter: ShardedParameter, name: str, tensor: Any) -> None:
        if name == PROJECTION and not parameter.is_meta:
            raise OSError("the disk is gone")
        load(parameter, name, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(ShardedParameter, "load", break_off)
        with pytest.raises(EngineError, match="they are a mixture: .*the disk is gone"):
            engine.update_weights(folders[2], "bad")
    assert outputs_of(engine) == expected[1]
    assert engine.control("server_info")["weight_version"] == "good"


def test_adapters_stay_on_the_new_base(folders: list[Path], tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj"
    outputs, inputs = load_file(folders[0] / "model.safetensors")[f"{name}.weight"].shape
    generator = torch.Generator().manual_seed(1)
    shapes = {"lora_A": (8, inputs), "lora_B": (outputs, 8)}
    tensors = {f"base_model.model.{name}.{each}.weight": torch.randn(shape, generator=generator) for each, shape in shapes.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "base_model_name_or_path": "base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    def adapted(engine: Engine) -> list[list[int]]:
        return [engine.generate(prompt, PARAMS, lora="a").token_ids for prompt in PROMPTS]

    with Engine(str(folders[1]), enable_lora=True, **KEYS) as other:
        other.load_lora_adapter("a", tmp_path)
        expected = adapted(other)
        assert expected != [tokens for tokens, _ in outputs_of(other)]
    with Engine(str(folders[0]), enable_lora=True, **KEYS) as engine:
        engine.load_lora_adapter("a", tmp_path)
        assert adapted(engine) != expected
        engine.update_weights(folders[1])
        assert adapted(engine) == expected


@pytest.mark.slow
def test_a_prediction_layer_of_the_checkpoint_is_updated_too(tmp_path: Path) -> None:
    """The number of accepted drafts is that of a fresh engine."""
    folder = find_model("frame-tiny")
    other = change(folder, tmp_path / "other")
    keys = {**KEYS, "page_size": 16, "speculative_algorithm": "mtp", "speculative_adaptive": False}

    def run(engine: Engine) -> tuple[list[list[int]], int, int]:
        before = engine.control("server_info")
        tokens = [engine.generate(prompt, {"max_tokens": 40, "temperature": 0.0}).token_ids for prompt in PROMPTS]
        after = engine.control("server_info")
        return tokens, *(after[name] - before[name] for name in ("drafted_tokens", "accepted_tokens"))  # type: ignore[return-value]

    with Engine(str(other), **keys) as fresh:
        expected = run(fresh)
    assert expected[2] > 0
    with Engine(str(folder), **keys) as engine:
        assert run(engine) != expected
        engine.update_weights(other)
        assert run(engine) == expected


@pytest.mark.slow
def test_two_ranks_load_their_slices(tmp_path: Path) -> None:
    """Of latent attention and experts."""
    first, second = (make_checkpoint("DeepseekV3ForCausalLM", tmp_path / name, seed) for seed, name in enumerate(("first", "second")))
    with Engine(str(second), tp=2, **KEYS) as other:
        expected = outputs_of(other)
    with Engine(str(first), tp=2, **KEYS) as engine:
        assert outputs_of(engine) != expected
        broken = rewrite(second, tmp_path / "broken", lambda tensors: dict(list(tensors.items())[1:]))
        with pytest.raises(EngineError, match="lacks"):
            engine.update_weights(broken)
        engine.update_weights(second)
        assert outputs_of(engine) == expected


@pytest.mark.slow
def test_a_server_that_is_killed_comes_back_with_the_new_weights(folders: list[Path], expected: list[Any]) -> None:
    flags = ("--dtype", "float32", "--max-model-len", "256", "--max-total-tokens", "4096", "--page-size", "4")
    with RunningServer(folders[0], *flags, fake=False) as server:

        def ask(number: int) -> dict[str, Any]:
            params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
            reply: dict[str, Any] = server.post("/generate", {"input_ids": PROMPTS[number], "sampling_params": params}).json()
            return reply

        def check(version: str, index: int) -> None:
            for number, (tokens, _) in enumerate(expected[index]):
                reply = ask(number)
                assert (reply["output_ids"], reply["meta_info"]["weight_version"]) == (tokens, version)
            assert server.get("/get_weight_version") == {"weight_version": version}
            assert server.get("/server_info")["weight_version"] == version
            assert server.get("/model_info")["weight_version"] == version
            assert f'weight_version="{version}"' in httpx.get(server.url + "/metrics", timeout=30).text

        check("default", 0)
        refused = server.post("/update_weights_from_disk", {"model_path": str(folders[0] / "config.json")})
        assert refused.status_code == 400 and "is a file" in refused.json()["error"]["message"]
        kept = server.post("/update_weights_from_disk", {"model_path": str(folders[1]), "flush_cache": False})
        assert kept.status_code == 400 and "flush_cache" in kept.json()["error"]["message"]
        check("default", 0)
        body = {"input_ids": PROMPTS[0], "stream": True, "sampling_params": {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}}
        with httpx.stream("POST", server.url + "/generate", json=body, timeout=60) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            updated = server.post("/update_weights_from_disk", {"model_path": str(folders[1]), "weight_version": "step 1"})
            assert updated.json() == {
                "success": True, "message": "the weights are updated", "weight_version": "step 1", "num_paused_requests": 1,
            }  # fmt: skip
            *_, last, end = lines
            assert end == "data: [DONE]"
            meta = json.loads(last.removeprefix("data: "))["meta_info"]
            assert (meta["completion_tokens"], meta["weight_version"]) == (200, "step 1")
        check("step 1", 1)
        server.children()["scheduler"].kill()
        wait_until(lambda: any("engine ready again" in line for line in server.lines))
        check("step 1", 1)
        with httpx.stream("POST", server.url + "/generate", json=body, timeout=60) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            updated = server.post("/update_weights_from_disk", {"model_path": str(folders[2]), "abort_all_requests": True})
            assert updated.json()["num_paused_requests"] == 0
            *_, last, end = lines
            assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
        check("v2", 2)
