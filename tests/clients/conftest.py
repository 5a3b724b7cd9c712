"""One server with the embedded model for all client libraries, which are used as they come: only
their base URL is ours.

The server sees the base installation alone, so that what clients do works without extras."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.entrypoints import base_only
from tests.entrypoints.serving import RunningServer

# frame-tiny's own template knows no tools; this one shows them, and takes the results back, as
# Hermes models are trained to.
TEMPLATE = """{{ bos_token }}{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{% for message in messages %}
{%- if message.role == 'tool' %}<|user|><tool_response>{{ message.content }}</tool_response>
{%- else %}<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# A small model thinks no end where it may.
CONFIG = """
model: {{dtype: float32}}
text: {{reasoning_parser: think-tags, tool_call_parser: hermes, chat_template: {template}}}
server: {{api_key: {key}}}
plugins: {{options: {{reasoning_parser/think-tags: {{opens_itself: false}}}}}}
"""
MODEL = "frame-tiny"
KEY = "a-key"
CITIES = {"type": "string", "enum": ["Oslo", "Rome"]}  # a small model finds no end of a string
WEATHER_SCHEMA = {"type": "object", "properties": {"city": CITIES}, "required": ["city"], "additionalProperties": False}
CALL = r'<tool_call>\{"name": "get_weather", "arguments": \{"city": "(Oslo|Rome)"\}\}</tool_call>'  # a regex: the model knows no tools


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """No proxy of the environment is asked, and no library looks for news of itself."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            patch.delenv(name)
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("LITELLM_TELEMETRY", "False")
        patch.setenv("LANGSMITH_TRACING", "false")
        yield


@pytest.fixture(scope="session")
def litellm(_no_network: None) -> Any:
    """Imported after the environment is set: it looks for news of itself when it is imported."""
    import litellm as library

    library.telemetry = False
    return library


@pytest.fixture(scope="session")
def clients_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("clients")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(template=template, key=KEY))
    with RunningServer(Path(MODEL), "--config", str(config), fake=False, env=base_only.environment()) as running:
        yield running


@pytest.fixture(scope="session")
def quick_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A fake model with room for batches, 1 ms a step."""
    folder = tmp_path_factory.mktemp("batches") / "new"
    batches = ("--batch-folder", str(folder), "--batch-max-bytes", "60000", "--batch-concurrency", "4")
    parsers = ("--reasoning-parser", "think-tags", "--tool-call-parser", "hermes")
    with RunningServer(checkpoint, *batches, *parsers, "--max-model-len", "128", env={"FRAME_FAKE_STEP": "0.001"}) as running:
        yield running


@pytest.fixture(scope="session")
def url(clients_server: RunningServer) -> str:
    return clients_server.url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)
