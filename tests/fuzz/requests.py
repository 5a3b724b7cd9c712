"""Right requests to start from, one or more for each route that takes a body. What is not named
here starts from an empty object."""

# ruff: noqa: E501 - tables
from __future__ import annotations

from typing import Any

CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
CALLS = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "y"},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 1, "stop": ["a", "b"], "logit_bias": {"5": 1.0}, "frequency_penalty": 0.1,
    "presence_penalty": 0.1, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 0, "ignore_eos": True, "stop_token_ids": [7],
    "bad_words": ["x"], "custom": {"a": "b"}, "priority": 1, "cache_salt": "s", "timeout": 5.0, "user": "u", "skip_special_tokens": True,
}  # fmt: skip

BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": CHAT, "max_tokens": 2},
        {"messages": CHAT, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}, **SAMPLING},
        {"messages": CALLS, "max_tokens": 2, "tools": [TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2},
        {"messages": CHAT, "max_completion_tokens": 2, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
        {"messages": CHAT, "max_tokens": 2, "model": "frame-tiny", "chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"},
    ],
    "/v1/completions": [
        {"prompt": "x", "max_tokens": 2, "echo": True, "logprobs": 1},
        {"prompt": ["x", "y"], "max_tokens": 2, "stream": True, **SAMPLING},
        {"prompt": [5, 6], "max_tokens": 2, "prompt_logprobs": 1},
        {"prompt": [[5, 6], [7]], "max_tokens": 1, "regex": "a+", "suffix": ""},
    ],
    "/generate": [
        {"text": "x", "sampling_params": {"max_new_tokens": 2, **{k: v for k, v in SAMPLING.items() if k in ("temperature", "n", "stop")}}},
        {"input_ids": [[5, 6], [7]], "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 0}], "return_logprob": True, "stream": True,
         "top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True, "priority": 0, "rid": "r"},
    ],
    "/tokenize": [{"text": "x", "add_special_tokens": False, "return_token_strs": True}, {"messages": CHAT, "tools": [TOOL]}],
    "/detokenize": [{"tokens": [5, 6, 7], "skip_special_tokens": True}],
    "/abort_request": [{"rid": "x"}, {"rid": ["x", "y"]}],
    "/v1/messages": [
        {"model": "frame-tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]},
        {"model": "frame-tiny", "max_tokens": 2, "system": [{"type": "text", "text": "s"}], "stream": True, "temperature": 0.5, "top_k": 5,
         "stop_sequences": ["a"], "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
         "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ],
    "/v1/messages/count_tokens": [{"model": "frame-tiny", "messages": [{"role": "user", "content": "x"}]}],
    "/v1/responses": [
        {"input": "x", "max_output_tokens": 2},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "max_output_tokens": 2, "stream": True, "store": True,
         "instructions": "i", "tools": [{"type": "function", "name": "f", "parameters": {}}], "text": {"format": {"type": "text"}}},
        {"input": [{"type": "item_reference", "id": "msg_x"}, {"type": "custom_tool_call", "call_id": "c", "name": "g", "input": "x"}],
         "max_output_tokens": 2, "background": True, "stream": True, "truncation": "auto", "include": ["message.output_text.logprobs"],
         "top_logprobs": 2, "max_tool_calls": 1, "conversation": {"id": "conv_x"}, "tools": [{"type": "custom", "name": "g",
         "format": {"type": "grammar", "syntax": "regex", "definition": "a"}}], "tool_choice": {"type": "custom", "name": "g"}},
        {"input": [{"role": "user", "content": "x"}] * 20, "max_output_tokens": 2, "truncation": "auto", "background": True, "stream": True},
    ],
    "/v1/conversations": [{"items": [{"role": "user", "content": "x"}], "metadata": {"a": "b"}}],
    "/v1/embeddings": [{"input": "x", "model": "frame-tiny"}, {"input": [[5, 6]], "encoding_format": "base64", "dimensions": 4}],
    "/v1/chat/completions/batch": [{"model": "frame-tiny", "max_tokens": 2, "messages": [CHAT, CHAT]}],
    "/v1/chat/completions/render": [{"model": "frame-tiny", "max_tokens": 2, "messages": CHAT, "tools": [TOOL]}],
    "/v1/completions/render": [{"prompt": ["x", "y"], "max_tokens": 2}, {"prompt": [5, 6]}],
    "/pooling": [{"input": "x", "task": "embed"}],
    "/separate_reasoning": [{"text": "<think>x</think>y"}],
    "/parse_function_call": [{"text": "x", "tools": [TOOL]}],
    "/invocations": [{"messages": CHAT, "max_tokens": 2}, {"prompt": "x", "max_tokens": 2}, {"text": "x", "sampling_params": {"max_new_tokens": 2}},
                     {"input": "x"}],
    "/v2/embed": [{"model": "frame-tiny", "texts": ["x"], "input_type": "search_query", "embedding_types": ["float"], "truncate": "END"},
                  {"inputs": [{"content": [{"type": "text", "text": "x"}]}], "output_dimension": 4}],
    "/embed": [{"inputs": ["x"], "truncate": True, "normalize": True, "truncation_direction": "right"}],
    "/rerank": [{"query": "x", "texts": ["a", "b"], "return_text": True}, {"query": "x", "documents": ["a", {"text": "b"}], "top_n": 1}],
    "/api/chat": [
        {"model": "frame-tiny", "messages": CHAT, "options": {"num_predict": 2, "temperature": 0.5, "num_ctx": 64, "stop": ["a"]}, "think": True},
        {"model": "frame-tiny", "stream": False, "options": {"num_predict": 2}, "tools": [TOOL], "messages": [{"role": "user", "content": "x"},
         {"role": "assistant", "thinking": "t", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
         {"role": "tool", "tool_name": "f", "content": "y"}]},
    ],
    "/api/generate": [{"model": "frame-tiny", "prompt": "x", "system": "s", "options": {"num_predict": 2}, "stream": False},
                      {"model": "frame-tiny", "prompt": "x", "raw": True, "format": "json", "options": {"num_predict": 2}}],
    "/api/embed": [{"model": "frame-tiny", "input": ["x"], "truncate": True, "dimensions": 4}],
    "/api/show": [{"model": "frame-tiny"}],
    "/v1/rerank": [{"query": "x", "documents": ["a", "b"], "top_n": 1}],
    "/v1/score": [{"text_1": "x", "text_2": ["y", "z"]}],
    "/v1/moderations": [{"input": ["x"]}],
    "/start_profile": [{"num_steps": 1}],
}  # fmt: skip
