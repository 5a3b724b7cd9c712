"""`return_hidden_states` over HTTP, by the `openai` package and on SGLang's own route."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from frame.testing.checkpoints import load_reference
from tests.entrypoints.serving import RunningServer

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return load_reference(checkpoint)


@torch.no_grad()
def wanted(model: Any, ids: list[int]) -> np.ndarray:
    states: np.ndarray = model.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return states


def close(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(found), expected, atol=1e-4, rtol=1e-4)


def test_generate(server: RunningServer, model: Any) -> None:
    """A list for the prompt, then one state for each token of the output but the last."""
    params = [{**GREEDY, "max_new_tokens": 6}, {"max_new_tokens": 1}, {"max_new_tokens": 3, "n": 2, "sampling_seed": 4}]
    body = {"input_ids": [[5, 6, 7], [9], [8, 9, 10, 11]], "sampling_params": params, "return_hidden_states": True}
    results = server.post("/generate", {**body, "return_logprob": True, "logprob_start_len": 0}).json()
    prompts = [*body["input_ids"], body["input_ids"][-1]]
    assert len(results) == 4
    for prompt, result in zip(prompts, results, strict=True):
        first, *rest = result["meta_info"]["hidden_states"]
        assert len(first) == len(prompt) and len(rest) == len(result["output_ids"]) - 1
        close([*first, *rest], wanted(model, prompt + result["output_ids"][:-1]))
        assert len(result["meta_info"]["input_token_logprobs"]) == len(prompt)
    single = server.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": params[0], "return_hidden_states": True}).json()
    assert single["meta_info"]["hidden_states"][0][0] == results[0]["meta_info"]["hidden_states"][0][0]
    plain = server.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": params[0]}).json()
    assert plain["output_ids"] == single["output_ids"] and "hidden_states" not in plain["meta_info"]


def test_chats_and_completions(server: RunningServer, model: Any) -> None:
    """The state of the last token that the model read, as SGLang returns it."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "tiny-llama", "max_tokens": 4, "extra_body": {"return_hidden_states": True, "return_token_ids": True, **GREEDY}}
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "The quick"}], n=2, **asked)
    for choice in chat.choices:
        close(choice.hidden_states, wanted(model, chat.prompt_token_ids + choice.token_ids[:-1])[-1])
    text = client.completions.create(prompt=["The quick", "brown"], **asked)
    assert len(text.choices) == 2
    for one in text.choices:
        close(one.hidden_states, wanted(model, one.prompt_token_ids + one.token_ids[:-1])[-1])
    asked["max_tokens"] = 1  # the model has read the prompt alone
    assert client.chat.completions.create(messages=[{"role": "user", "content": "x"}], **asked).choices[0].hidden_states == []


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/generate", {"text": "x", "stream": True}, "return_hidden_states cannot be streamed; leave stream out"),
        ("/v1/completions", {"prompt": "x", "stream": True}, "return_hidden_states cannot be streamed; leave stream out"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, "return_hidden_states is not supported with images"),
        ("/v1/completions", {"prompt": ["x"] * 100, "max_tokens": 500, "n": 2}, r"exceed the bound of a response, 4194304 numbers"),
        ("/generate", {"text": "x", "sampling_params": {"return_hidden_states": True}}, "unknown sampling parameter"),
        ("/v1/responses", {"input": "x"}, "return_hidden_states is not a field of this route"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}, "return_hidden_states is not a field"),
    ],
)
def test_refusals(server: RunningServer, path: str, body: dict[str, Any], says: str) -> None:
    response = server.post(path, {"model": "tiny-llama", "return_hidden_states": True, **body})
    assert response.status_code == 400, response.text
    assert says in response.json()["error"]["message"]
