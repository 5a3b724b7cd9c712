"""The policy for fields: each is implemented, refused by name, or reported as ignored, on every
route."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.protocol.fields import EMPTY_ASKS, FALSE_ASKS, MAX_UNKNOWN, NEUTRAL, REFUSED, WITHOUT_EFFECT, check_fields
from tests.entrypoints.inprocess import InProcess, Response, serving
from tests.entrypoints.published import ROUTES

HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 2},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "frame-tiny", "messages": HI, "max_tokens": 2},
    GENERATE: {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
}

# The fields of the peers' request classes, as their sources have them.
VLLM_SHARED = """frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream stream_options
    temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection thinking_token_budget stream_interval"""
VLLM_CHAT = """top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning parallel_tool_calls
    add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
    mm_processor_kwargs return_prompt_text"""
VLLM_COMPLETION = "suffix prompt_embeds"
VLLM_RESPONSES = """background include instructions max_output_tokens max_tool_calls metadata model logit_bias parallel_tool_calls
    previous_response_id prompt reasoning service_tier store stream temperature text tool_choice tools top_logprobs top_p
    top_k truncation user skip_special_tokens include_stop_str_in_output prompt_cache_key request_id mm_processor_kwargs
    priority cache_salt enable_response_messages previous_input_messages previous_response structured_outputs
    repetition_penalty seed stop ignore_eos vllm_xargs"""
VLLM_MESSAGES = """metadata output_config stop_sequences stream system temperature tool_choice tools top_k top_p kv_transfer_params
    chat_template_kwargs"""
SGLANG_SHARED = """frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options temperature top_p
    user return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details return_token_ids
    top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos
    skip_special_tokens lora_path session_id session_params response_format custom_params custom_logit_processor
    images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank rid
    extra_key cache_salt ngram_corpus_id priority"""
SGLANG_CHAT = """top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls return_prompt_token_ids return_meta_info
    reasoning_effort task continue_final_message separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch
    min_dynamic_patch use_audio_in_video input_ids reasoning"""
SGLANG_COMPLETION = "best_of echo suffix json_schema custom_labels"
SGLANG_GENERATE = """rid session_id input_ids input_embeds image_data video_data audio_data mm_hashes mm_content_hashes use_audio_in_video
    video_config return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_sampling_mask
    return_text_in_logprobs return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 stream log_metrics
    return_hidden_states return_routed_experts routed_experts_start_len return_indexer_topk modalities session_params
    lora_path lora_id custom_logit_processor positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room
    bootstrap_pair_key decode_tp_size routed_dp_rank data_parallel_rank disagg_prefill_dp_rank kv_router_hint routing_key
    conversation_id http_worker_ipc background require_reasoning max_thinking_tokens priority extra_key no_logs
    custom_labels return_bytes return_entropy return_prompt_token_ids external_trace_header received_time
    need_wait_for_mm_inputs num_items_assigned encoder_urls max_dynamic_patch min_dynamic_patch image_max_dynamic_patch
    video_max_dynamic_patch images_config multi_item_delimiter_indices cache_salt"""
PEERS: dict[str, str] = {
    CHAT: " ".join((VLLM_SHARED, VLLM_CHAT, SGLANG_SHARED, SGLANG_CHAT)),
    COMPLETIONS: " ".join((VLLM_SHARED, VLLM_COMPLETION, SGLANG_SHARED, SGLANG_COMPLETION)),
    "/v1/responses": VLLM_RESPONSES,
    "/v1/messages": VLLM_MESSAGES,
    GENERATE: SGLANG_GENERATE,
}
MODELS = {route.path: route.body_model for route in ROUTES}


def names_of(path: str) -> set[str]:
    model = MODELS[path]
    assert model is not None
    return set(model.model_fields)


@pytest.mark.parametrize("path", BODIES)
async def test_every_field_of_the_peers_is_implemented_or_refused_by_name(path: str) -> None:
    """Each field goes to every route, also to those whose peer has it elsewhere."""
    async with serving() as server:
        for name in sorted(set(" ".join(PEERS.values()).split()) - names_of(path)):
            reply = await server.post(path, {**BODIES[path], name: "something"})
            if name in WITHOUT_EFFECT:
                assert (reply.status, "x-frame-ignored-fields" in reply.headers) == (200, False), name
                continue
            error = reply.json()["error"]
            assert reply.status == 400, (path, name)
            assert error["message"].startswith(f"{name} is not "), (path, name, error)
            if path not in ("/v1/messages", "/v1/responses"):  # Anthropic has no param; responses call some of chat's otherwise
                assert error["param"] == name


@pytest.mark.parametrize("path", BODIES)
async def test_values_that_ask_for_nothing_are_taken(path: str) -> None:
    async with serving() as server:
        unknown = {name: None for name in REFUSED if name not in names_of(path)}
        neutral = {name: values[0] for name, values in NEUTRAL.items() if name in unknown}
        more: dict[str, Any]
        false = dict.fromkeys(unknown.keys() - FALSE_ASKS, False)
        for more in (unknown, false, dict.fromkeys(unknown, ""), {name: [] for name in unknown}, neutral):
            reply = await server.post(path, {**BODIES[path], **more})
            assert reply.status == 200, reply.body
            assert "x-frame-ignored-fields" not in reply.headers
        for name, value in [EMPTY_ASKS] if EMPTY_ASKS[0] in unknown else []:
            assert (await server.post(path, {**BODIES[path], name: value})).json()["error"]["message"].startswith(f"{name} is not ")
        for name in unknown.keys() & FALSE_ASKS:
            reply = await server.post(path, {**BODIES[path], name: False})
            assert (reply.status, reply.json()["error"]["message"].split()[0]) == (400, name)


async def test_unknown_names_are_suggested_or_reported() -> None:
    async with serving() as server:
        reply = await server.post(CHAT, {**BODIES[CHAT], "max_token": 3})
        assert reply.status == 400
        assert reply.json()["error"]["message"] == "max_token is no field of this route; did you mean max_tokens?"
        for name, meant in (("stpo", "stop"), ("top-k", "top_k"), ("toolz", "tools"), ("sede", "seed"), ("Max-Tokens", "max_tokens")):
            reply = await server.post(CHAT, {**BODIES[CHAT], name: None})
            assert reply.status == 400
            assert reply.json()["error"]["message"] == f"{name} is no field of this route; did you mean {meant}?"
        foreign = ["top_a", "typical_p", "provider", "route", "transforms", "usage", "api_key", "id", "mirostat", "num_ctx", "stops_at"]
        reply = await server.post(CHAT, {**BODIES[CHAT], **dict.fromkeys(foreign, 1)})
        assert (reply.status, reply.headers["x-frame-ignored-fields"]) == (200, ", ".join(foreign))
        for stream in (False, True):
            unknown = {"x_trace": 1, "größe\r\nset-cookie: a": 2}
            reply = await server.post(CHAT, {**BODIES[CHAT], "stream": stream, **unknown})
            assert reply.status == 200
            assert reply.headers["x-frame-ignored-fields"] == "x_trace, gr??e??set-cookie??a"
        reply = await server.post(CHAT, {**BODIES[CHAT], **{f"name{i}": i for i in range(MAX_UNKNOWN + 1)}})
        assert reply.status == 400
        assert "unknown fields" in reply.json()["error"]["message"]


SCHEMA_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True, "description": "b"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        (CHAT, {"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        (CHAT, {"response_format": {**SCHEMA_FORM, "strict": True}}, "response_format.strict"),
        (
            CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stritc": True}}},
            "response_format.json_schema.stritc",
        ),
        (CHAT, {"response_format": {"type": "structural_tag", "format": {}, "tags": []}}, "response_format.tags"),
        (COMPLETIONS, {"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        (CHAT, {"structured_outputs": {"regex": "a", "whitespace_patern": " "}}, "structured_outputs.whitespace_patern"),
        (COMPLETIONS, {"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices"),
        (CHAT, {"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag"),
        (COMPLETIONS, {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ("/v1/responses", {"text": {"format": {"type": "json_object", "x": 1}}}, "text.format.x"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": {}, "stritc": True}}}, "text.format.stritc"),
    ],
)  # fmt: skip
async def test_unknown_nested_fields_are_refused(path: str, fields: dict[str, Any], param: str) -> None:
    async with serving() as server:
        reply = await server.post(path, {**BODIES[path], **fields})
        error = reply.json()["error"]
        assert (reply.status, error["param"]) == (400, param)
        assert error["message"].startswith(f"{param} is not a known field; ")


async def test_options_of_streams_need_a_stream() -> None:
    async with serving() as server:
        for path in (CHAT, COMPLETIONS):
            error = (await server.post(path, {**BODIES[path], "stream_options": {"include_usage": True}})).json()["error"]
            assert (error["param"], error["message"]) == ("stream_options", "stream_options needs stream: true; send both, or neither")


async def test_known_nested_fields_pass() -> None:
    fields: list[dict[str, Any]] = [
        {"stream_options": {"include_usage": True, "continuous_usage_stats": False, "include_obfuscation": False}},
        {"stream_options": None}, {"response_format": {"type": "text", "json_schema": None}}, {"structured_outputs": None},
    ]  # fmt: skip
    async with serving() as server:
        for more in fields:
            reply = await server.post(CHAT, {**BODIES[CHAT], "stream": True, **more})
            assert reply.status == 200, reply.body
    constraint = {"regex": "a", "disable_fallback": True, "disable_any_whitespace": True, "disable_additional_properties": False}
    assert ChatRequest(messages=HI, structured_outputs=constraint).to_sampling_params(SamplingParams()).regex == "a"
    assert ChatRequest(messages=HI, response_format=SCHEMA_FORM).to_sampling_params(SamplingParams()).json_schema is not None


@pytest.mark.slow
def test_what_unknown_names_cost_is_bounded() -> None:
    """A body of the largest size with nothing but unknown names is refused before names are
    compared."""
    data = msgspec.json.encode({f"temperatur{i:07}": 1 for i in range(200_000)})
    parsed = min(_seconds(lambda: msgspec.json.decode(data)) for _ in range(3))
    given, known = msgspec.json.decode(data), names_of(CHAT)

    def refused() -> None:
        with pytest.raises(ApiError):
            check_fields(known, given)

    assert min(_seconds(refused) for _ in range(3)) < 10 * parsed


def _seconds(act: Any) -> float:
    start = time.process_time()
    act()
    return time.process_time() - start


async def tokens(server: InProcess, text: str, **more: Any) -> list[int]:
    found: list[int] = (await server.post("/tokenize", {"prompt": text, **more})).json()["tokens"]
    return found


def events(reply: Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in reply.body.split(b"\n") if line.startswith(b"data: ")]
    return [msgspec.json.decode(line) for line in lines if line != b"[DONE]"]


async def test_return_token_ids() -> None:
    async with serving() as server:
        prompt = (await server.post("/tokenize", {"messages": HI})).json()["tokens"]
        asked = {"messages": HI, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True, "seed": 3}
        whole = (await server.post(CHAT, asked)).json()
        assert whole["prompt_token_ids"] == prompt
        ids = whole["choices"][0]["token_ids"]
        assert len(ids) == 5
        chunks = events(await server.post(CHAT, {**asked, "stream": True}))
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt, *[None] * (len(chunks) - 1)]
        assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == ids

        asked = {"prompt": "hi", "max_tokens": 5, "ignore_eos": True, "return_token_ids": True, "seed": 3}
        choice = (await server.post(COMPLETIONS, asked)).json()["choices"][0]
        assert (choice["prompt_token_ids"], len(choice["token_ids"])) == (await tokens(server, "hi"), 5)
        choices = [chunk["choices"][0] for chunk in events(await server.post(COMPLETIONS, {**asked, "stream": True}))]
        assert choices[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert [i for each in choices for i in each.get("token_ids", [])] == choice["token_ids"]


async def test_return_tokens_as_token_ids() -> None:
    async with serving() as server:
        asked = {"max_tokens": 2, "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
        choice = (await server.post(CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2, **asked})).json()["choices"][0]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert all(top["token"].startswith("token_id:") for entry in choice["logprobs"]["content"] for top in entry["top_logprobs"])
        choice = (await server.post(COMPLETIONS, {"prompt": "hi", "logprobs": 1, **asked})).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


@pytest.mark.parametrize(("side", "part"), [(None, slice(-4, None)), ("left", slice(-4, None)), ("right", slice(4))])
async def test_truncate_prompt_tokens(side: str | None, part: slice) -> None:
    async with serving() as server:
        text = "one two three four five six seven"
        ids = await tokens(server, text)
        asked = {"prompt": text, "max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
        assert (await server.post(COMPLETIONS, asked)).json()["choices"][0]["prompt_token_ids"] == ids[part]


async def test_truncation_to_what_fits() -> None:
    async with serving() as server:
        text = "word " * 700
        ids = await tokens(server, text)
        asked = {"prompt": text, "max_tokens": 12, "return_token_ids": True, "truncate_prompt_tokens": -1}
        assert (await server.post(COMPLETIONS, asked)).json()["choices"][0]["prompt_token_ids"] == ids[-500:]
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "truncate_prompt_tokens": -1}
        assert (await server.post(CHAT, chat)).json()["usage"]["prompt_tokens"] == 500
        for wrong in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": 4, "truncation_side": "middle"}):
            error = (await server.post(CHAT, {**chat, **wrong})).json()["error"]
            assert error["param"] in wrong


async def test_add_special_tokens_and_documents_in_chat() -> None:
    async with serving() as server:
        plain = (await server.post("/tokenize", {"messages": HI})).json()["tokens"]
        more = (await server.post("/tokenize", {"messages": HI, "add_special_tokens": True})).json()["tokens"]
        usage = (await server.post(CHAT, {**BODIES[CHAT], "add_special_tokens": True})).json()["usage"]
        assert usage["prompt_tokens"] == len(more)
        assert more[-len(plain) :] == plain
        assert (await server.post(CHAT, {**BODIES[CHAT], "documents": [{"title": "t", "text": "x"}]})).status == 200


async def test_echo_in_chat() -> None:
    async with serving() as server:
        turn = [*HI, {"role": "assistant", "content": "Well, "}]
        asked = {"messages": turn, "max_tokens": 3, "seed": 1, "ignore_eos": True, "continue_final_message": True}
        plain = (await server.post(CHAT, asked)).json()["choices"][0]["message"]
        echoed = (await server.post(CHAT, {**asked, "echo": True})).json()["choices"][0]["message"]
        assert echoed["content"] == "Well, " + plain["content"]
        chunks = events(await server.post(CHAT, {**asked, "echo": True, "stream": True}))
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == echoed["content"]
        begun = {**asked, "continue_final_message": None, "messages": HI}
        one, other = [(await server.post(CHAT, {**begun, "echo": echo})).json()["choices"][0]["message"] for echo in (False, True)]
        assert one == other  # the user's message is not the answer's beginning


async def test_a_template_of_a_request_needs_the_operators_consent() -> None:
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}!{% endfor %}"
    async with serving() as server:
        reply = await server.post(CHAT, {**BODIES[CHAT], "chat_template": template})
        assert (reply.status, reply.json()["error"]["param"]) == (400, "chat_template")
        for path in (CHAT, "/v1/messages", "/v1/responses"):
            reply = await server.post(path, {**BODIES[path], "chat_template_kwargs": {"chat_template": template}})
            assert reply.status == 400
            assert "chat_template_kwargs cannot set chat_template" in reply.json()["error"]["message"]
    async with serving({"text": {"trust_request_chat_template": True}}) as server:
        found = (await server.post("/tokenize", {"messages": HI, "chat_template": template})).json()["tokens"]
        assert (await server.post("/detokenize", {"tokens": found, "skip_special_tokens": True})).json()["text"] == "hi!"
        usage = (await server.post(CHAT, {**BODIES[CHAT], "chat_template": template})).json()["usage"]
        assert usage["prompt_tokens"] == len(found)
        reply = await server.post(CHAT, {**BODIES[CHAT], "chat_template": "{% if %}"})
        assert reply.status == 400
        assert "chat_template does not compile" in reply.json()["error"]["message"]
        reply = await server.post(CHAT, {**BODIES[CHAT], "chat_template_kwargs": {"chat_template": template}})
        assert reply.status == 400
