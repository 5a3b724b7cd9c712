"""docs/compatibility.md, row by row: what differs from vLLM and SGLang is asked of servers over
sockets, and a behaviour that holds names its tests. A row without an entry here fails."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from tests.clients.conftest import KEY, MODEL
from tests.entrypoints.fork_server import run_forked
from tests.entrypoints.serving import RunningServer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/compatibility.md").read_text()
CHAT, COMPLETIONS, GENERATE, RESPONSES = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses"
HI = [{"role": "user", "content": "What is 2 + 5?"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": HI, "max_tokens": 8},
    COMPLETIONS: {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 8},
    GENERATE: {"text": "def", "sampling_params": {"max_new_tokens": 2}},
    RESPONSES: {"model": MODEL, "input": "hi", "max_output_tokens": 16},
}
EMBEDDINGS, POOLING, SCORE = "/v1/embeddings", "/pooling", "/v1/score"  # of the server that embeds
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
FILE = [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]
MCP = {"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:9"}


class Asked(NamedTuple):
    """A request with `fields`. param, says: the field of the error, and words of its sentence.
    ignored: what the header lists. status 0: that of the row."""

    path: str
    fields: dict[str, Any]
    says: str = ""
    param: str | None = None
    ignored: str | None = None
    status: int = 0


class Started(NamedTuple):
    """Arguments of `frame config check` or `frame serve`, which end with words of `says`."""

    arguments: tuple[str, ...]
    says: str


def named(path: str, name: str, value: Any, **fields: Any) -> Asked:
    return Asked(path, {name: value, **fields}, name, name)


HERE = "tests/clients/test_compatibility.py::"
PEERS = "tests/clients/test_peer_behaviours.py::"
DIFFERS: dict[str, list[Asked | Started | str]] = {
    "`prompt_embeds`, `input_embeds`": [
        named(COMPLETIONS, "prompt_embeds", "AAAA"), named(CHAT, "prompt_embeds", "AAAA"), named(GENERATE, "input_embeds", [[0.5]]),
    ],
    "`return_hidden_states` of a stream": [
        Asked(path, {"return_hidden_states": True, "stream": True}, "cannot be streamed", "return_hidden_states")
        for path in (CHAT, COMPLETIONS, GENERATE)
    ],
    "`kv_transfer_params.return_last_hidden_state`": [
        Asked(path, {"kv_transfer_params": {"return_last_hidden_state": True}}, "is not a known field",
              "kv_transfer_params.return_last_hidden_state") for path in (CHAT, COMPLETIONS)
    ],
    "`use_beam_search`, `length_penalty`": [
        named(path, name, value) for path in (CHAT, COMPLETIONS) for name, value in (("use_beam_search", True), ("length_penalty", 0.8))
    ],
    "`allowed_token_ids`": [named(path, "allowed_token_ids", [5]) for path in (CHAT, COMPLETIONS)],
    "`logprobs: -1` and more than 20, which a flag allows": [
        named(COMPLETIONS, "logprobs", -1), named(COMPLETIONS, "logprobs", 21),
        *(named(CHAT, "top_logprobs", count, logprobs=True) for count in (-1, 21)),
    ],
    "`logprob_token_ids` of 3 ids displaces one of them where the sampled token is another": [PEERS + "test_logprobs_of_listed_tokens"],
    "`cache_salt` that is empty returns 400": [Asked(path, {"cache_salt": ""}, status=200) for path in (CHAT, COMPLETIONS, RESPONSES)],
    "the last chunk of a chat stream has content": [HERE + "test_the_last_chunk_may_have_no_content"],
    "`custom_logit_processor` (serialised code)": [named(path, "custom_logit_processor", "{}") for path in (CHAT, COMPLETIONS, GENERATE)],
    "`session_params`": [
        *(named(path, "session_params", {"id": "x"}) for path in (CHAT, COMPLETIONS)),
        "tests/entrypoints/http/protocol/test_sessions.py::test_a_session_continues_from_an_earlier_request",
    ],
    "classes of tokens (`token_classify`)": [Asked(POOLING, {"input": "x", "task": "token_classify"}, "task is 'token_classify'", "task")],
    "late interaction (ColBERT)": [Started(("config", "check", "--skip-tokenizer-init", "--model", "{colbert}"), "HF_ColBERT")],
    "scores of images, embeddings of images": [
        Asked(EMBEDDINGS, {"messages": [{"role": "user", "content": [IMAGE]}]}, "text only"),
        Asked(SCORE, {"text_1": "x", "text_2": [{"content": [IMAGE]}]}, "text_2"),
        Asked(SCORE, {"data_1": "x", "data_2": {"content": [IMAGE]}}, "text_1"),
    ],
    "`mm_processor_kwargs`, `media_io_kwargs` of a request": [
        Asked(path, {name: {"x": 1}}, "media.processor_options", name)
        for path in (CHAT, RESPONSES) for name in ("mm_processor_kwargs", "media_io_kwargs")
    ],
    "MCP and hosted tools of Responses": [
        Asked(RESPONSES, {"tools": [MCP, {"type": "web_search"}]}, ignored="tools[0], tools[1]", status=200),
        Asked(RESPONSES, {"tools": [MCP], "tool_choice": "required"}, "only OpenAI's servers run", "tool_choice"),
        Asked(RESPONSES, {"tools": [MCP], "tool_choice": {"type": "mcp", "server_label": "x"}}, "only OpenAI's servers run", "tool_choice"),
    ],
    "`enable_response_messages` of Responses": [named(RESPONSES, "enable_response_messages", True)],
    "Responses over WebSocket": [HERE + "test_responses_have_no_websocket"],
    "speech output, turn detection of `/v1/realtime`": ["tests/clients/test_openai_realtime.py::test_events_that_are_refused"],
    "uploaded files as chat parts (`file_id`)": [Asked(CHAT, {"messages": FILE}, "file_id is not supported")],
    "`--load-format tensorizer`, a root path": [
        Started(("config", "check", "--model", "frame-tiny", "--load-format", "tensorizer"), "Unknown weight_source 'tensorizer'"),
        Started(("serve", "--model", "frame-tiny", "--root-path", "/x"), "let the proxy remove the prefix"),
    ],
    "LoRA resolver plugins": [
        Asked(CHAT, {"model": "an-adapter-of-a-resolver"}, "does not exist", "model", status=404),
        "tests/entrypoints/http/operations/test_adapters.py::test_forms_of_vllm_and_sglang",
    ],
    "texts of error messages": [HERE + "test_errors_have_what_clients_read"],
}  # fmt: skip
FIELDS, EMBEDS = "tests/entrypoints/http/protocol/test_fields.py::", "tests/entrypoints/http/openai/test_embedding_fields.py::"
HOLDS: dict[str, list[str]] = {
    "log-probabilities": [PEERS + "test_logprobs_of_chats", PEERS + "test_logprobs_of_prompts", PEERS + "test_logprobs_of_listed_tokens",
                          PEERS + "test_too_many_logprobs_leave_the_server_fine"],
    "streams": [PEERS + "test_a_stream_joins_to_the_whole_response", PEERS + "test_usage_in_a_stream"],
    "`n` choices": [PEERS + "test_several_choices", PEERS + "test_completions_of_texts_and_ids"],
    "`structured_outputs`": [PEERS + "test_structured_outputs", "tests/clients/agents/test_peer_fields.py::test_older_structural_tags"],
    "`tool_choice`": ["tests/clients/test_openai_tools.py::test_a_required_call_is_a_valid_call",
                      "tests/clients/test_openai_tools.py::test_a_named_function_is_called_by_every_choice",
                      "tests/clients/test_agent_requests.py::test_strict_function_that_may_be_called"],
    "reasoning": ["tests/clients/agents/test_thinking_fields.py::test_switches",
                  "tests/clients/agents/test_thinking_fields.py::test_hidden_reasoning",
                  "tests/clients/agents/test_thinking_fields.py::test_reasoning_in_the_content",
                  "tests/clients/agents/test_thinking_budget.py::test_a_budget_ends_the_reasoning"],
    "messages": [PEERS + "test_fields_and_contents_of_messages", PEERS + "test_a_response_continues_a_message",
                 FIELDS + "test_echo_in_chat"],
    "`truncate_prompt_tokens`": [PEERS + "test_lengths_out_of_range", FIELDS + "test_return_token_ids",
                                 FIELDS + "test_return_tokens_as_token_ids"],
    "`/tokenize`": ["tests/clients/test_peers.py::test_rendered_prompts_can_be_generated_from",
                    "tests/clients/test_peers.py::test_a_batch_of_conversations",
                    "tests/clients/test_peers.py::test_version_load_and_tokenizer",
                    "tests/clients/test_peers.py::test_invocations_go_where_their_fields_belong", HERE + "test_texts_of_tokens"],
    "embeddings": [EMBEDS + "test_messages", EMBEDS + "test_normalize_and_truncation", EMBEDS + "test_types_of_numbers_and_bytes",
                   "tests/entrypoints/http/native/test_rerank.py::test_score",
                   "tests/entrypoints/http/native/test_rerank.py::test_classify_equals_transformers"],
    "a vector for each token": ["tests/entrypoints/http/native/test_token_vectors.py::test_pooling"],
    "`return_hidden_states`": ["tests/entrypoints/http/protocol/test_hidden_states.py::test_generate",
                               "tests/entrypoints/http/protocol/test_hidden_states.py::test_chats_and_completions"],
    "Responses": ["tests/clients/test_openai_responses.py::test_kept_responses",
                  "tests/clients/test_openai_responses.py::test_conversations",
                  "tests/clients/test_openai_responses.py::test_response_and_its_stream",
                  "tests/clients/agents/test_openai_agent_tools.py::test_namespaces"],
    "what ended a response": [PEERS + "test_what_ended_a_response", "tests/clients/agents/test_stop_regex.py::test_chats_and_completions"],
    "prompts beyond the context": [PEERS + "test_lengths_out_of_range", PEERS + "test_prompts_that_are_refused",
                                   PEERS + "test_bodies_that_are_no_requests"],
    "models": [PEERS + "test_models", "tests/entrypoints/http/test_adapters.py::test_models_have_a_parent"],
}  # fmt: skip


def read_rows(title: str) -> dict[str, list[str]]:
    """The rows of the table below a heading: first cell -> the others."""
    table = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[2:]}


ROWS = read_rows("What differs")


@pytest.fixture(scope="module")
def embedder(checkpoint: Path) -> Iterator[RunningServer]:
    with RunningServer(checkpoint, "--model-task", "embed", "--max-total-tokens", "4096", fake=False) as running:
        yield running


def test_each_row_has_its_checks() -> None:
    assert list(ROWS) == list(DIFFERS)
    for row, cells in ROWS.items():
        if asked := [each for each in DIFFERS[row] if isinstance(each, Asked)]:
            sent = json.dumps([each.fields for each in asked])
            missing = [name for name in re.findall(r"`([a-z_]+)`", row) if name not in sent]
            assert missing == [], row
            statuses = re.findall(r"\b[45]\d\d\b", cells[1]) or ["200"]
            assert {str(each.status) for each in asked if each.status} <= {"200", *statuses}, row
    holds = read_rows("What holds")
    assert [next((name for name in HOLDS if row.startswith(name)), row) for row in holds] == list(HOLDS)


@pytest.mark.parametrize(
    "test", sorted({each for checks in (*DIFFERS.values(), *HOLDS.values()) for each in checks if isinstance(each, str)})
)
def test_named_tests_exist(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row, checks in DIFFERS.items() if any(isinstance(each, Asked) for each in checks)])
def test_what_differs(row: str, url: str, embedder: RunningServer) -> None:
    for each in DIFFERS[row]:
        if not isinstance(each, Asked):
            continue
        base = embedder.url if each.path in (EMBEDDINGS, POOLING, SCORE) else url
        body = {**BODIES.get(each.path, {}), **each.fields}
        reply = httpx.post(base + each.path, json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
        assert reply.status_code == (each.status or int(re.findall(r"\b4\d\d\b", ROWS[row][1])[0])), (each, reply.text)
        assert reply.status_code >= 400 or reply.headers.get("x-frame-ignored-fields") == each.ignored, each
        if reply.status_code >= 400:
            error = reply.json()["error"]
            assert each.says in error["message"], each
            assert each.param in (None, error["param"]), each


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row, checks in DIFFERS.items() if any(isinstance(each, Started) for each in checks)])
def test_what_does_not_start(row: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 100, "intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["HF_ColBERT"], "model_type": "bert", **sizes}))
    for each in DIFFERS[row]:
        if isinstance(each, Started):
            arguments = [argument.replace("{colbert}", str(tmp_path)) for argument in each.arguments]
            done = run_forked([sys.executable, "-m", "frame", *arguments])
            assert done.returncode != 0
            assert each.says in done.stderr


def test_the_last_chunk_may_have_no_content(url: str) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 8, "temperature": 0}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert not chunks[-1].choices[0].delta.content
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        == client.chat.completions.create(**asked).choices[0].message.content
    )


def test_responses_have_no_websocket(url: str) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    address = url.replace("http", "ws", 1) + RESPONSES
    with pytest.raises(InvalidStatus) as caught, connect(address, additional_headers={"authorization": f"Bearer {KEY}"}, proxy=None):
        pass
    assert str(caught.value.response.status_code) in ROWS["Responses over WebSocket"][1]


def test_errors_have_what_clients_read(url: str) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[], temperature=0)
    assert (caught.value.status_code, caught.value.type, caught.value.param) == (400, "invalid_request_error", "messages")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="another", prompt="x")
    assert (missing.value.type, missing.value.param, missing.value.code) == ("not_found_error", "model", "model_not_found")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0).models.list()


def test_texts_of_tokens(url: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"prompt": "def add", "return_token_strs": True}
    found = httpx.post(url + "/tokenize", json=body, headers=headers, timeout=60).json()
    assert len(found["token_strs"]) == len(found["tokens"]) == found["count"]
    again = httpx.post(
        url + "/detokenize", json={"tokens": found["tokens"], "skip_special_tokens": True}, headers=headers, timeout=60
    ).json()
    assert again.get("prompt", again.get("text")) == "def add"
