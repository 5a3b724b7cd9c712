"""`Resolved`: the configuration with nothing left open, what was chosen, and why. Plain data that crosses to child processes as JSON.

Made by `frame.core.config.resolve`; every process checks the plugins that it finds against `plugins` before it loads one.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from frame.core.config.schema import FrameConfig
from frame.core.interfaces.model import ModelConfig, Pooling, Task


class PluginChoice(BaseModel):
    """A selected plugin: enough to find it again in another process and to notice that it is another one."""

    model_config = ConfigDict(frozen=True)

    kind: str
    name: str
    target: str
    distribution: str
    version: str
    options: dict[str, Any] = {}


class Resolved(BaseModel):
    """Every value that a process needs to start. `reasons` maps a key (`cache.page_size`) to one sentence for each value that
    the user left open. `plugins` maps a kind to the choices of that kind (one,
    but for logits processors, and attention backends where prompts and decodes have one each, in this order). `rejected` maps
    a key to the plugins that were turned down, each with its reasons."""

    model_config = ConfigDict(frozen=True)

    user: FrameConfig
    model_path: str
    served_name: str
    tokenizer_path: str | None  # None: skip_tokenizer_init
    model: ModelConfig
    device: str
    dtype: str
    kv_dtype: str
    max_context: int
    page_size: int
    max_running_requests: int
    chunked_prefill_size: int
    overlap: bool
    cuda_graph_max_bs: int = 0  # 0: no graphs
    prompt_graph_max_tokens: int = 0  # 0: no graphs
    jump_forward: int = 0  # 0: never
    mem_fraction: float
    max_total_tokens: int | None  # None: from the free memory, once the weights are loaded
    threads: int | None
    task: Task = "generate"
    pooling: Pooling | None = None  # None: the task is generate
    plugins: dict[str, list[PluginChoice]]
    reasons: dict[str, str]
    rejected: dict[str, dict[str, list[str]]] = {}

    @property
    def computes_whole_prompts(self) -> bool:
        """No prompt is cut into chunks or begun from a cached prefix."""
        return self.pooling is not None and self.pooling.needs_whole_prompts(self.model.encoder)

    def choice(self, kind: str) -> PluginChoice:
        """The one selected plugin of a kind. Raises KeyError when the kind was not needed."""
        return self.plugins[kind][0]
