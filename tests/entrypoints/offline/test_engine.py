"""`frame.Engine`: every form of prompt, sync, async and streaming; the same texts each way; errors;
processes with tp 2."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch

from frame import Engine, SamplingParams
from frame.config.schema import FrameConfig
from frame.core.errors import ConfigurationError
from frame.core.execution.model_runner import TorchModelRunner
from frame.core.interfaces.batch import ScheduledBatch
from frame.core.interfaces.runner import DeviceLost
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.offline.collector import Output
from frame.entrypoints.offline.engine import EngineError

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
KEYS = {"max_model_len": 256, "max_total_tokens": 4096, "threads": 1}


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(model=str(checkpoint), **KEYS) as running:
        yield running


def test_forms_of_prompts(engine: Engine) -> None:
    text = engine.generate("The quick", GREEDY)
    ids = engine.tokenizer.encode("The quick")
    assert isinstance(text, Output)
    assert engine.generate(ids, GREEDY).token_ids == text.token_ids
    both = engine.generate(["The quick", ids], GREEDY)
    assert [output.token_ids for output in both] == [text.token_ids] * 2
    assert text.text == engine.tokenizer.decode(text.token_ids)
    assert (text.finish_reason, text.prompt_tokens, len(text.token_ids)) == ("length", len(ids), 10)
    chat = [{"role": "user", "content": "hi"}]
    assert engine.generate(chat, GREEDY).token_ids == engine.generate([chat, chat], GREEDY)[1].token_ids
    assert engine.generate([]) == []


def test_a_fork_of_the_process_is_an_error(engine: Engine) -> None:
    """The engine's threads do not run in it, so a call would wait forever."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(writing, "w", encoding="utf-8") as file:
            for call in (lambda: engine.generate("a", GREEDY), lambda: list(engine.stream("a", GREEDY)), engine.flush_cache):
                try:
                    call()
                    file.write("no error\n")
                except EngineError as error:
                    file.write(f"{error}\n")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as file:
        lines = file.read().splitlines()
    os.waitpid(child, 0)
    assert len(lines) == 3 and all(f"a fork of process {os.getpid()}" in line for line in lines), lines
    assert engine.generate("a", GREEDY).token_ids


def test_calls_without_parameters_take_the_defaults_of_the_checkpoint(engine: Engine, checkpoint: Path, tmp_path: Path) -> None:
    """Greedy by top_k 1; a call with parameters has those alone."""
    folder = tmp_path / "with-defaults"
    shutil.copytree(checkpoint, folder)
    (folder / "generation_config.json").write_text('{"top_k": 1}')
    greedy = engine.generate("The quick", GREEDY)
    with Engine(model=str(folder), **KEYS) as other:
        assert other.get_default_sampling_params() == SamplingParams(top_k=1)
        assert all(other.generate("The quick").token_ids[:10] == greedy.token_ids for _ in range(3))
        assert other.generate("The quick", {"max_tokens": 10, "seed": 1}).token_ids != greedy.token_ids
    assert engine.get_default_sampling_params() == SamplingParams()


def test_parameters_one_or_each(engine: Engine) -> None:
    outputs = engine.generate(["a", "b"], [{"max_tokens": 2}, SamplingParams(max_tokens=3)])
    assert [len(output.token_ids) for output in outputs] == [2, 3]
    with pytest.raises(InvalidRequestError, match="params has 1 entries for 2 prompts"):
        engine.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequestError, match="unknown sampling parameter 'tempreature'"):
        engine.generate("a", {"tempreature": 1})
    with pytest.raises(InvalidRequestError, match="temperature is -1"):
        engine.generate("a", {"temperature": -1.0})
    with pytest.raises(InvalidRequestError, match="shorten the prompt"):
        engine.generate([5] * 400)


def test_arrays_are_token_ids(engine: Engine) -> None:
    ids = engine.tokenizer.encode("The quick")
    wanted = engine.generate(ids, GREEDY).token_ids
    for one in (np.array(ids), torch.tensor(ids), tuple(ids), [np.int64(token) for token in ids]):
        assert engine.generate(one, GREEDY).token_ids == wanted
    assert [output.token_ids for output in engine.generate([np.array(ids), ids], GREEDY)] == [wanted] * 2
    assert len(engine.generate(np.array([ids, ids]), GREEDY)) == 2


@pytest.mark.parametrize("prompt", [None, 5, b"abc", [b"abc"], [None], [1.5, 2.5], [1, "a"], [True], {"role": "user"}])
def test_what_is_no_prompt_is_refused(engine: Engine, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="give a string, a list of token ids or a list of chat messages"):
        engine.generate(prompt, GREEDY)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (5, "give SamplingParams or a dict"),
        ([None], "give SamplingParams or a dict"),
        ({"max_tokenz": 2}, "did you mean 'max_tokens'"),
        ({"choice": []}, "choice is empty; leave it out"),
        (SamplingParams(choice=()), "choice is empty; leave it out"),
        ({"temperature": "hot"}, "temperature: expected `float`, got `str`"),
        (SamplingParams(max_tokens="two"), "max_tokens"),  # type: ignore[arg-type]
        (SamplingParams(temperature="hot"), "temperature"),  # type: ignore[arg-type]
    ],
)
def test_wrong_parameters_are_refused_by_name(engine: Engine, params: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        engine.generate(["a"], params)
    assert engine.generate("a", GREEDY).token_ids


def test_half_a_surrogate_pair_and_an_unknown_command_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        engine.generate("\ud800", GREEDY)
    with pytest.raises(InvalidRequestError, match="messages"):
        engine.generate([{}], GREEDY)
    with pytest.raises(EngineError, match="no command 'nope'"):
        engine.control("nope")


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "system", "content": None}])
def test_a_message_without_content_is_named(engine: Engine, message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]\.content is missing"):
        engine.generate([{"role": "user", "content": "a"}, message], GREEDY)


def test_one_stop_string_needs_no_list(engine: Engine) -> None:
    assert SamplingParams(stop="END", bad_words="x") == SamplingParams(stop=("END",), bad_words=("x",))
    text = engine.generate("a", GREEDY).text
    stop = text[3:5]
    for params in (SamplingParams(max_tokens=10, temperature=0.0, stop=stop), {"max_tokens": 10, "temperature": 0.0, "stop": stop}):  # type: ignore[arg-type]
        assert engine.generate("a", params).matched == stop


def test_streaming_adds_up(engine: Engine) -> None:
    prompts = ["The quick", "A request"]
    whole = engine.generate(prompts, GREEDY)
    texts, ids = ["", ""], [[], []]  # type: ignore[var-annotated]
    for delta in engine.stream(prompts, GREEDY):
        texts[delta.index] += delta.text
        ids[delta.index] += delta.token_ids
    assert texts == [output.text for output in whole]
    assert ids == [output.token_ids for output in whole]
    deltas = list(engine.stream("The quick", msgspec.structs.replace(GREEDY, stream_interval=4)))
    assert "".join(delta.text for delta in deltas) == whole[0].text
    # An event that is read late has the tokens of the steps since; none has fewer than the interval
    assert min(len(delta.token_ids) for delta in deltas[1:-1]) >= 4


async def test_async_forms(engine: Engine) -> None:
    whole = engine.generate("The quick", GREEDY)
    many = await asyncio.gather(*(engine.agenerate("The quick", GREEDY) for _ in range(5)))
    assert {tuple(output.token_ids) for output in many} == {tuple(whole.token_ids)}
    assert "".join([delta.text async for delta in engine.astream("The quick", GREEDY)]) == whole.text


async def test_cancelling_ends_the_request(engine: Engine) -> None:
    task = asyncio.create_task(engine.agenerate("The quick", SamplingParams(max_tokens=240, ignore_eos=True)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.generate("x", SamplingParams(max_tokens=1)).finish_reason
    assert engine.control("server_info")["running"] == 0


def test_leaving_a_stream_ends_the_request(engine: Engine) -> None:
    for _ in engine.stream("The quick", SamplingParams(max_tokens=240, ignore_eos=True)):
        break
    engine.generate("x", SamplingParams(max_tokens=2))
    info = engine.control("server_info")
    assert (info["running"], info["waiting"], info["used_pages"]) == (0, 0, 0)


def test_stop_strings_and_n(engine: Engine) -> None:
    text = engine.generate("The quick", GREEDY).text
    stopped = engine.generate("The quick", SamplingParams(max_tokens=10, temperature=0.0, stop=(text[4:6],)))
    assert (stopped.text, stopped.finish_reason, stopped.matched) == (text[: text.index(text[4:6])], "stop", text[4:6])
    several = engine.generate("The", SamplingParams(max_tokens=8, n=3, seed=5))
    assert len({tuple(output.token_ids) for output in several.outputs}) == 3
    assert several.outputs[0] is several
    assert repr(several).count("Output(") == 3 and "outputs=[...," in repr(several)


def test_logprobs(engine: Engine) -> None:
    output = engine.generate("The quick", SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, prompt_logprobs=0))
    assert output.logprobs.token_ids == output.token_ids
    found = zip(output.token_ids, output.logprobs.logprobs, output.logprobs.top, strict=True)
    assert all(top[0] == (token, pytest.approx(value)) for token, value, top in found)
    assert len(output.prompt_logprobs.logprobs) == output.prompt_tokens
    assert output.prompt_logprobs.logprobs[0] is None


def test_cache_is_seen_and_flushed(engine: Engine) -> None:
    prompt = list(range(10, 100))
    engine.flush_cache()
    assert engine.generate(prompt, GREEDY).cached_tokens == 0
    assert engine.generate(prompt, GREEDY).cached_tokens == 80
    engine.flush_cache()
    assert engine.generate(prompt, GREEDY).cached_tokens == 0
    engine.control("check_integrity")


def test_ids_only(checkpoint: Path) -> None:
    with Engine(model=str(checkpoint), skip_tokenizer_init=True, load_format="dummy", **KEYS) as engine:
        outputs = engine.generate([[3, 4, 5], [6, 7]], [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in (4, 7)])
        assert [len(output.token_ids) for output in outputs] == [4, 7]
        assert outputs[0].text == ""
        with pytest.raises(EngineError, match="skip_tokenizer_init"):
            engine.generate("text")
        with pytest.raises(InvalidRequestError, match="stop needs a tokenizer"):
            engine.generate([3, 4], SamplingParams(stop=("a",)))


def test_a_closed_engine_says_so(checkpoint: Path) -> None:
    config = FrameConfig.model_validate({"model": {"path": str(checkpoint), "max_context": 64}, "cache": {"max_total_tokens": 512}})
    engine = Engine(config=config)
    assert engine.info["max_context"] == 64
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate("x")
    with pytest.raises(EngineError, match="closed"):
        engine.control("ping")


def fragile(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, deaths: int, **more: Any) -> Engine:
    """An engine that dies at the tenth step, so many times."""
    left = [deaths]
    launch = TorchModelRunner.launch

    def dying(runner: TorchModelRunner, batch: ScheduledBatch) -> Any:
        if batch.step == 10 and left[0]:
            left[0] -= 1
            raise DeviceLost("the device is gone")
        return launch(runner, batch)

    monkeypatch.setattr(TorchModelRunner, "launch", dying)
    return Engine(model=str(checkpoint), dtype="float32", **KEYS, **more)


PROMPTS = ["The quick", "brown", "fox", "jumps"]
LONG = {"max_tokens": 40, "ignore_eos": True}
PARAMS: list[dict[str, Any]] = [
    {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True},
    {**LONG, "temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {**LONG, "temperature": 0.9, "seed": 5, "frequency_penalty": 0.4},
    {**LONG, "temperature": 0.9, "seed": 6, "n": 2, "stop": ("\x00\x00never",)},
]


def plain(outputs: list[Output]) -> list[Any]:
    found = [each for output in outputs for each in output.outputs]
    scores = [[each and each.token_ids for each in (output.logprobs, output.prompt_logprobs)] for output in found]
    return [[(output.text, output.token_ids, output.finish_reason, output.error) for output in found], scores]


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_call_outlives_its_engine(checkpoint: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, deaths: int) -> None:
    expected = engine.generate(PROMPTS, PARAMS)
    with fragile(checkpoint, monkeypatch, deaths) as dying:
        assert plain(dying.generate(PROMPTS, PARAMS)) == plain(expected)
        dying.control("check_integrity")


def test_a_stream_outlives_its_engine(checkpoint: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [o for output in engine.generate(PROMPTS, PARAMS) for o in output.outputs]

    async def collect(dying: Engine, texts: list[str]) -> None:
        async for delta in dying.astream(PROMPTS, PARAMS):
            texts[delta.index] += delta.text

    with fragile(checkpoint, monkeypatch, 2) as dying:
        texts = [""] * len(expected)
        for delta in dying.stream(PROMPTS, PARAMS):
            texts[delta.index] += delta.text
        assert texts == [output.text for output in expected]
    with fragile(checkpoint, monkeypatch, 1) as dying:
        texts = [""] * len(expected)
        asyncio.run(collect(dying, texts))
        assert texts == [output.text for output in expected]
    with fragile(checkpoint, monkeypatch, 1) as dying:
        assert plain(asyncio.run(dying.agenerate(PROMPTS, PARAMS))) == plain(engine.generate(PROMPTS, PARAMS))


def test_a_call_that_ends_engine_after_engine_is_given_up_with_what_was_finished(
    checkpoint: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [o for output in engine.generate(PROMPTS, PARAMS) for o in output.outputs]
    with fragile(checkpoint, monkeypatch, deaths=3) as dying:
        with pytest.raises(EngineError, match="the device is gone; 3 engines crashed during this call") as caught:
            dying.generate(PROMPTS, PARAMS)
        first, *others = caught.value.outputs
        assert (first.text, first.finish_reason, first.error) == (expected[0].text, "length", None)
        for output, whole in zip(others, expected[1:], strict=True):
            assert "the device is gone" in (output.error or "")
            assert 20 < len(output.token_ids) < 40
            assert output.token_ids == whole.token_ids[: len(output.token_ids)]
            assert whole.text.startswith(output.text.rstrip("\ufffd"))
        assert dying.generate(PROMPTS[0], PARAMS[0]).text == first.text  # by a fourth one
    with pytest.raises(EngineError, match="closed"):
        dying.generate("x")


def test_where_no_other_engine_starts_the_call_says_so(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fragile(checkpoint, monkeypatch, deaths=1) as dying:

        def refuse(*_: object) -> None:
            raise RuntimeError("the device is busy")

        dying._open = refuse  # type: ignore[assignment]
        with pytest.raises(EngineError, match="the device is gone; the engine could not be restarted: the device is busy"):
            dying.generate("The quick", LONG)


def test_a_dead_engine_leaves_no_memory_behind(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fragile(checkpoint, monkeypatch, deaths=1) as dying:
        runners = [weakref.ref(found) for found in gc.get_objects() if type(found) is TorchModelRunner]
        assert dying.generate("The quick", LONG).finish_reason == "length"
        assert sum(ref() is None for ref in runners) == 1


def test_wrong_configuration_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'tp'"):
        Engine(model="frame-tiny", tpp=2)
    for keywords in ({"port": 8000}, {"server": {"max_body_bytes": 2048}}, {"reasoning_parser": "deepseek_r1"}):
        with pytest.raises(ConfigurationError, match=f"^keyword {next(iter(keywords))}: .* applies to servers"):
            Engine(**keywords)
    with pytest.raises(ConfigurationError, match="is no folder"):
        Engine(model=str(tmp_path / "nothing"))


@pytest.mark.slow
def test_two_ranks_in_processes_give_the_same_tokens(checkpoint: Path, engine: Engine) -> None:
    prompts = [[3 + i, 4, 5] for i in range(4)]
    with Engine(model=str(checkpoint), tp=2, dtype="float32", **KEYS) as two:
        assert [o.token_ids for o in two.generate(prompts, GREEDY)] == [o.token_ids for o in engine.generate(prompts, GREEDY)]
        assert two.generate("The quick", GREEDY).text == engine.generate("The quick", GREEDY).text
        two.control("check_integrity")
        with pytest.raises(EngineError, match=r"no command 'server_inf'; did you mean 'server_info'\?"):
            two.control("server_inf")
        deployment = two._session._deployment  # type: ignore[attr-defined]
        family = [psutil.Process(pid) for pid in deployment.pids.values()]
        deployment.children["rank-1"].process.kill()
        assert two.generate("The quick", GREEDY).text == engine.generate("The quick", GREEDY).text  # by other processes
        psutil.wait_procs(family, timeout=120)
        assert not any(child.is_running() for child in family)
