"""`Resolved`: the complete configuration, with the selected plugins and the reasons. Plain data,
sent to child processes as JSON.

Made by `frame.config.resolve`. Each process compares the plugins that it finds with
`Resolved.plugins` before it loads one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from frame.config.schema import FrameConfig
from frame.core.interfaces.drafter import DrafterContext, TreeShape
from frame.core.interfaces.model import ModelConfig, Pooling, Task
from frame.core.interfaces.parallel import ParallelPlan
from frame.core.interfaces.sampling_params import SamplingParams
from frame.interfaces.modality import MediaPlan

# Sampling parameters that `sampling.defaults` may set
DEFAULT_PARAMS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
LOST_WEIGHTS = "the weights {!r} came from a trainer and were lost in a restart; update the weights, or keep them by --keep-updates FOLDER"


class PluginChoice(BaseModel):
    """A selected plugin: enough to find it in another process, and to detect that another version
    is installed there."""

    model_config = ConfigDict(frozen=True)

    kind: str
    name: str
    target: str  # module:attribute
    distribution: str
    version: str
    options: dict[str, Any] = {}  # the plugin's own settings, complete


class Resolved(BaseModel):
    """Every value that a process needs to start."""

    model_config = ConfigDict(frozen=True)

    user: FrameConfig
    model_path: str
    served_name: str  # the model's name in the API
    tokenizer_path: str | None  # None: skip_tokenizer_init
    model: ModelConfig
    device: str
    dtype: str  # computing type
    kv_dtype: str
    plan: ParallelPlan = ParallelPlan()
    max_context: int  # tokens
    page_size: int  # tokens
    max_running_requests: int
    chunked_prefill_size: int  # most prompt tokens of a step
    overlap: bool
    cuda_graph_max_bs: int = 0  # rows of the largest captured decode; 0: no graphs
    prompt_graph_max_tokens: int = 0  # tokens of the largest captured step with prompts; 0: no graphs
    jump_forward: int = 0  # fewest forced tokens computed in one step; 0: never
    grammar_mask_processes: int = 0
    grammar_cache: int = 256 << 20  # bytes of compiled grammars
    mem_fraction: float
    max_total_tokens: int | None  # None: computed from the free memory once the weights are loaded
    threads: int | None  # of one rank, on the CPU
    task: Task = "generate"
    pooling: Pooling | None = None  # None: the task is generate
    media: MediaPlan | None = None  # None: the model reads text alone, or its encoder's output is no part of the prompt (Whisper)
    # By kind. One choice each, except logits processors, and attention backends: [prefill, decode]
    # if they differ.
    plugins: dict[str, list[PluginChoice]]
    reasons: dict[str, str]  # by setting (`cache.page_size`): one sentence for each value that the user left open
    sampling_defaults: dict[str, int | float] = {}  # of requests that leave these parameters out
    refused_params: dict[str, str] = {}  # by request parameter that no chosen logits processor implements: why, for the client
    custom_params: tuple[str, ...] | None = None  # keys of `custom` that the chosen logits processors read; None: any
    tree: TreeShape | None = None  # of drafts; None: chains, or there is no drafter
    weights_path: str | None = None  # the checkpoint that the weights were last updated to; None: model_path
    weight_version: str = "default"  # of the weights, as the updates name them
    awaits_weights: str = ""  # why those of the checkpoint must not be served before an update; empty: they may
    draft: Resolved | None = None  # of a drafter whose model is that of a model plugin
    rejected: dict[str, dict[str, list[str]]] = {}  # by setting, then by plugin: why it was rejected
    lacking_media: dict[str, str] = {}  # by modality that the model reads and no plugin can be used for: why

    @property
    def batch_folder(self) -> Path | None:
        """`batches.folder`, else a folder in `server.state_dir`; None without both."""
        if self.user.batches.folder is not None:
            return Path(self.user.batches.folder)
        return None if self.user.server.state_dir is None else Path(self.user.server.state_dir) / "batches"

    @property
    def default_params(self) -> SamplingParams:
        """The sampling parameters of a request that sends none."""
        return SamplingParams(**self.sampling_defaults)  # type: ignore[arg-type]

    @property
    def computes_whole_prompts(self) -> bool:
        """Whether each prompt is computed in one step, without chunks or a cached prefix."""
        return self.pooling is not None and self.pooling.needs_whole_prompts(self.model.encoder)

    @property
    def weights_folder(self) -> str:
        """The checkpoint whose weights a start loads."""
        return self.weights_path or self.model_path

    @property
    def max_drafted(self) -> int:
        """Drafted tokens a step and sequence, at most; 0: there is no drafter."""
        if not self.plugins.get("drafter"):
            return 0
        return self.user.speculative.num_steps if self.tree is None else self.tree.num_nodes

    @property
    def drafter_context(self) -> DrafterContext:
        """What the drafter is built for."""
        return DrafterContext(
            vocab_size=self.model.vocab_size,
            max_slots=self.max_running_requests,
            max_context=self.max_context,
            num_steps=self.max_drafted,
            draft_model_path=self.user.speculative.draft_model_path,
            tree=self.tree,
        )

    def with_weights(self, folder: str | None, version: str) -> Resolved:
        """The same for an engine that is started after an update. folder: of the checkpoint with
        the weights; None: they came from a trainer, and were not kept."""
        served = {"weights_path": folder, "weight_version": version, "awaits_weights": "" if folder else LOST_WEIGHTS.format(version)}
        return self.model_copy(update=served)

    def choice(self, kind: str) -> PluginChoice:
        """The first selected plugin of a kind. Raises KeyError if the kind is not used."""
        return self.plugins[kind][0]
