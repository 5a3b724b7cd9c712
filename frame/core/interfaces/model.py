"""The interface of model architectures (kind `model`), and the configuration of a checkpoint,
which needs no torch to read.

A model file holds names and wiring. It must not know parallel arithmetic, a config section or a
backend by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from frame.core.interfaces.build import BuildContext
from frame.core.interfaces.plugin import Reason, list_batch_obstacles
from frame.core.interfaces.rank_context import Task

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from frame.core.interfaces.batch import ForwardBatch

__all__ = [
    "Activation",
    "CausalLM",
    "LazyTensor",
    "Model",
    "ModelCapabilities",
    "ModelConfig",
    "ModelContext",
    "ModelRequirements",
    "Pooling",
    "SentenceTransformersConfig",
    "Task",
    "checkpoint_tasks",
    "find_dense_layers",
    "is_classifier",
]

Activation = Literal["none", "sigmoid", "softmax"]


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the hidden states of a sequence become one vector."""

    mode: str  # the pooler, by plugin name
    normalize: bool = False  # to length 1
    activation: Activation = "none"  # after a classifier's head
    label_tokens: tuple[str, ...] = ()  # classify with the language model's head: the logits of these tokens alone
    whole_prompts: bool = True  # `PoolerCapabilities.whole_prompts`

    def needs_whole_prompts(self, is_encoder: bool) -> bool:
        """Whether one step must compute the whole prompt, without a cached prefix, because pooling
        reads all its hidden states."""
        return is_encoder or self.whole_prompts


@dataclass(frozen=True, slots=True)
class SentenceTransformersConfig:
    """The files of a sentence-transformers folder beside `config.json`."""

    mode: str | None = None  # the pooler, by plugin name; None: the folder names none
    normalize: bool = False
    max_tokens: int | None = None  # of an input
    prompts: dict[str, str] = field(default_factory=dict)  # name -> text put before an input
    default_prompt: str | None = None  # name of the prompt for inputs that name none
    lower_case: bool = False  # whether texts are lower-cased before they are tokenized
    pools_prompts: bool = True  # whether the tokens of a prompt are pooled with those of its text

    def lead(self, name: str | None = None) -> str:
        """The text put before an input: the named prompt, or the default one. Raises ValueError for
        an unknown name, and where its tokens would have to be left out of the pooling."""
        chosen = self.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in self.prompts:
            known = f"it has {', '.join(self.prompts)}" if self.prompts else "it has none; write the text before the input"
            raise ValueError(f"prompt_name {chosen!r} is no prompt of this model: {known}")
        if not self.pools_prompts:
            raise ValueError("prompt_name is not supported by this model, which pools no token of a prompt; leave it out")
        return self.prompts[chosen]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`config.json` in one vocabulary, read without torch by `frame.checkpoint.model_config`.
    Sizes are of the whole model."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # for mla: qk_nope_head_dim + qk_rope_head_dim
    v_head_dim: int
    kind: Literal["mha", "mla"]
    latent: tuple[int, int] | None  # mla: (kv_lora_rank, qk_rope_head_dim)
    max_context: int  # tokens that the model was trained for
    dtype: str  # of the checkpoint: "float32", "bfloat16", "float16"
    other_head_dims: tuple[int, ...] = ()  # of layers with heads of another size
    num_experts: int = 0
    sliding_window: int | None = None  # tokens
    quantization: str | None = None  # quant_method of the checkpoint; None: plain weights
    eos_token_ids: tuple[int, ...] = ()
    encoder: bool = False  # bidirectional attention, no KV cache; `resolve` sets it from the model's record
    labels: tuple[str, ...] = ()  # of a sequence classifier, in the order of its outputs
    sentence: SentenceTransformersConfig | None = None  # None: not a sentence-transformers folder
    config: dict[str, Any] = field(default_factory=dict)  # all of config.json (text part)
    full_config: dict[str, Any] = field(default_factory=dict)  # all of config.json, of a checkpoint with encoders; empty: it has none
    has_processor: bool = False  # it has the files of a processor of media
    sampling: dict[str, int | float] = field(default_factory=dict)  # the sampling parameters of generation_config.json
    chat_template: str = ""  # its source; shows how the model writes tool calls and reasoning

    @property
    def num_draft_layers(self) -> int:
        """Multi-token-prediction modules of the checkpoint, which only a drafter uses."""
        names = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
        return next((int(self.config[name]) for name in names if self.config.get(name)), 0)

    @property
    def encoder_length(self) -> int:
        """Positions of an encoder-decoder model's encoder output; 0 for other models."""
        return int(self.config["max_source_positions"]) if self.config.get("is_encoder_decoder") else 0

    @property
    def encoder_input(self) -> tuple[int, int]:
        """The shape of an encoder-decoder model's encoder input: mel bins, and frames."""
        return int(self.config["num_mel_bins"]), 2 * self.encoder_length

    @property
    def has_mrope(self) -> bool:
        """Whether rotary positions have three components (M-RoPE, arXiv 2409.12191)."""
        return any("mrope_section" in (self.config.get(key) or {}) for key in ("rope_scaling", "rope_parameters"))

    @property
    def num_labels(self) -> int:
        return max(1, len(self.labels))


@dataclass(frozen=True, slots=True)
class ModelCapabilities:
    """Which checkpoints a model plugin serves.

    `graphs`: CUDA graphs can capture its steps. No shape depends on data, nothing synchronises with
    the device, and outside of attention the model reads only token ids, positions and KV slots of
    the batch. Models with `sparse` also read rows, lengths and the page table; the host's lengths
    are then upper bounds. Of models with `sparse` or `cross_attention`, only decodes are captured.
    """

    architectures: tuple[str, ...] | None  # names in config.json; None: any (the fallback)
    tensor_parallel: bool = True
    pipeline_parallel: bool = False  # builds the layers of `BuildContext.pipeline` alone, and reads `StageInput`
    expands_mla: bool = False  # caches the expanded K and V of latent attention: the cache and the backend see an mha model
    tasks: tuple[Task, ...] = ("generate",)  # tasks that the plugin implements; `checkpoint_tasks` says what a checkpoint can do
    encoder: bool | str = False  # bidirectional attention, whole prompts in one step, no KV cache; a str: where this key is false
    sinks: bool = False  # its attention layers have sinks
    chunked: bool = False  # some of its attention layers attend in chunks
    sparse: bool = False  # its layers attend to selected keys
    recurrent: bool = False  # some layers keep a state for each sequence instead of keys
    windows: bool = False  # layers may have sliding windows
    cross_attention: bool = False  # an encoder-decoder model: layers attend to an encoder's output
    draft_layers: bool = False  # checkpoints may have a multi-token-prediction module, for a drafter
    biased_experts: bool = False  # its experts have biases or an activation of their own, see `MoERunner`
    graphs: bool = True
    modalities: tuple[str, ...] = ()  # media that its encoders read (`HasEncoders`); a checkpoint of text alone may have none of them
    media_spans: bool | str = False  # items attend in both directions (`MediaSpans`); a str: where `use_bidirectional_attention` is this
    batch_invariant: bool = False  # under `RankContext.deterministic`, the bits of a token's logits depend on the tokens up to it alone
    adapters: bool = True  # its layers apply the low-rank deltas of `BuildContext.adapters`

    def unsupported(self, requirements: ModelRequirements) -> list[Reason]:
        """All reasons why these capabilities do not meet `requirements`; empty: they do."""
        reasons = []
        if self.architectures is not None and requirements.architecture not in self.architectures:
            reasons.append(Reason(f"implements {', '.join(self.architectures)}, not {requirements.architecture}"))
        if requirements.tp > 1 and not self.tensor_parallel:
            reasons.append(Reason("has no tensor parallelism", "parallel.tp: 1"))
        if requirements.pp > 1 and not self.pipeline_parallel:
            reasons.append(Reason("has no pipeline parallelism", "parallel.pp: 1"))
        if requirements.pp > 1 and requirements.task != "generate":
            reasons.append(Reason(f"has no pipeline parallelism for the task {requirements.task}", "parallel.pp: 1"))
        if requirements.attention_groups and self.cross_attention:
            reasons.append(Reason("has no attention groups", "parallel.dp_attention: false"))
        if requirements.torch_compile and self.cross_attention:
            reasons.append(Reason("is not compiled by torch.compile", "execution.torch_compile: false"))
        if requirements.adapters and not self.adapters:
            reasons.append(Reason("does not apply LoRA adapters", "adapters.enabled: false"))
        if requirements.task not in self.tasks:
            reasons.append(Reason(f"serves {' and '.join(self.tasks)}, not {requirements.task}", f"model.task: {self.tasks[0]}"))
        return [*reasons, *list_batch_obstacles(self, requirements)]


@dataclass(frozen=True, slots=True)
class ModelRequirements:
    """What a checkpoint and a configuration require of a model plugin."""

    architecture: str
    tp: int = 1  # tensor-parallel ranks
    task: Task = "generate"
    pp: int = 1  # stages
    attention_groups: bool = False
    torch_compile: bool = False
    adapters: bool = False
    deterministic: bool = False  # execution.deterministic: only what is `batch_invariant` fits
    device: str = "cpu"


def find_dense_layers(config: Mapping[str, Any], num_layers: int, first_dense: int = 0) -> frozenset[int]:
    """The layers of a model with experts that have a plain MLP: those that `mlp_layer_types` does
    not call sparse, else the first `first_k_dense_replace` layers. first_dense: the number of these
    that the architecture has by default."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return frozenset(range(min(num_layers, config.get("first_k_dense_replace", first_dense) or 0)))
    return frozenset(layer for layer in range(num_layers) if kinds[layer] != "sparse")


def is_classifier(architecture: str) -> bool:
    """Whether a checkpoint of this architecture has a head over labels."""
    return architecture.endswith("ForSequenceClassification")


def checkpoint_tasks(architecture: str) -> tuple[Task, ...]:
    """The tasks of a checkpoint, by its architecture: a model without a head embeds, one with a
    head over labels classifies, and a language model serves all tasks."""
    if is_classifier(architecture):
        return ("classify",)
    return ("embed",) if architecture.endswith("Model") and "LMHead" not in architecture else ("generate", "embed", "classify")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext(BuildContext):
    """What a model is built from. Its layers take it as their `BuildContext`."""

    model_config: ModelConfig

    @classmethod
    def from_build(cls, build: BuildContext, model_config: ModelConfig) -> ModelContext:
        """The context of a model with this configuration on the rank of `build`."""
        return cls(**{each.name: getattr(build, each.name) for each in fields(build)}, model_config=model_config)


class LazyTensor(Protocol):
    """A tensor of a checkpoint. Slicing reads (mmaps) only the slice."""

    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> torch.Tensor: ...


class Model(ABC):
    """A model, built on the meta device from its context.

    Contract:
    - `forward` reads nothing but the batch and its own parameters, and returns hidden states after
      the final norm: of all tokens, or with `supports_token_selection` of the `SelectedTokens`.
    - `compute_logits` gets the rows that need logits only, which may be none. A decoder that
      generates (or classifies by label tokens) returns the full vocabulary on every rank, a
      sequence classifier its labels. Numbers that are not finite stay so: they end their request.
      It is not called for embeddings.
    - `load_weights` consumes every (name, tensor) and returns the names of the parameters that it
      set in this call, so that the loader can name the missing ones. An update calls it again. An
      unknown name is an error, unless `ignored_weights` matches it.
    Implementations also derive from `torch.nn.Module`.
    """

    ignored_weights: ClassVar[tuple[str, ...]] = ()  # regular expressions of checkpoint names that are not loaded
    supports_token_selection: ClassVar[bool] = False  # the last layer computes the `SelectedTokens` alone

    def __init__(self, context: ModelContext, options: BaseModel | None = None) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """-> hidden states [tokens or selected tokens, hidden_size]."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size], of a sequence classifier [n, labels]."""
        raise TypeError(f"{type(self).__name__} has no head")

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        """Set the parameters from a checkpoint's tensors, each sliced to this rank's part. Tensors
        come in any order, and those of an update in several calls, of which one may have a part of
        a layer. A tensor's values are valid until the next one is requested: copy what is kept."""


class CausalLM(Model):
    """A decoder with a head over the vocabulary."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size]."""
