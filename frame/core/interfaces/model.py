"""What a model architecture is (`model/1`), and the facts of a checkpoint that need no torch to read.

A model file holds names and wiring. It knows no parallel arithmetic, no config section and no backend by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from frame.core.interfaces.plugin import Reason

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext

API = "model/1"

Task = Literal["generate", "embed", "classify"]
PoolingMode = Literal["cls", "last", "mean", "max"]


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a sequence becomes one vector: `mode` says of which tokens (first, last, all), `normalize` whether its length is made 1.

    A classifier's vector goes through its head, then `activation`. With `label_tokens` the head is the language model's own,
    of which only these tokens' logits count.
    """

    mode: PoolingMode
    normalize: bool = False
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    label_tokens: tuple[str, ...] = ()

    def needs_whole_prompts(self, is_encoder: bool) -> bool:
        """Whether a prompt must be computed in one step and never from a cached prefix: all its hidden states are looked at."""
        return is_encoder or self.mode != "last"


@dataclass(frozen=True, slots=True)
class SentenceFacts:
    """What a folder in the layout of sentence-transformers says beside `config.json`. `prompts` are texts put before an input, by name."""

    mode: PoolingMode | None = None
    normalize: bool = False
    max_tokens: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    def lead(self, name: str | None = None) -> str:
        """The text that is put before an input: the named prompt, or the default one. Raises ValueError, a sentence."""
        chosen = self.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in self.prompts:
            known = f"it has {', '.join(self.prompts)}" if self.prompts else "it has none; put the text before the input yourself"
            raise ValueError(f"prompt_name {chosen!r} is no prompt of this model: {known}")
        return self.prompts[chosen]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What `config.json` says, in one vocabulary; read without torch by `frame.core.loading.model_config`. Sizes of the whole model."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # for mla: nope + rope
    v_head_dim: int
    kind: Literal["mha", "mla"]
    latent: tuple[int, int] | None  # mla: (kv_lora_rank, qk_rope_head_dim)
    max_context: int
    dtype: str
    num_experts: int = 0
    sliding_window: int | None = None
    quantization: str | None = None  # quant_method of the checkpoint
    eos_token_ids: tuple[int, ...] = ()
    encoder: bool = False  # attends in both directions and keeps no cache; set by `resolve` of the model's record
    labels: tuple[str, ...] = ()  # of a sequence classifier, in the order of its outputs
    sentence: SentenceFacts | None = None
    config: dict[str, Any] = field(default_factory=dict)  # the whole of config.json (text part)
    chat_template: str = ""  # its source, which shows how the model writes tool calls and thinking

    @property
    def num_labels(self) -> int:
        return max(1, len(self.labels))


@dataclass(frozen=True, slots=True)
class ModelCapabilities:
    """Which checkpoints a model plugin serves: names in `architectures`, or any (the fallback).

    `tasks` are what it can be asked for; what a checkpoint can do, its architecture's name says.
    `expands_mla`: it caches the expanded keys and values of latent attention, so for the cache and the backend the model is mha.
    `encoder`: it attends in both directions, computes a prompt in one piece and uses no KV cache.
    `graphs`: steps can be captured in CUDA graphs: no shape depends on data, nothing waits for the device, and outside of attention the
    model reads of the batch only what each token has (id, position, place in the cache).
    """

    architectures: tuple[str, ...] | None
    tensor_parallel: bool = True
    expands_mla: bool = False
    tasks: tuple[Task, ...] = ("generate",)
    encoder: bool = False
    graphs: bool = True

    def unsupported(self, requirements: ModelRequirements) -> list[Reason]:
        reasons = []
        if self.architectures is not None and requirements.architecture not in self.architectures:
            reasons.append(Reason(f"implements {', '.join(self.architectures)}, not {requirements.architecture}"))
        if requirements.tp > 1 and not self.tensor_parallel:
            reasons.append(Reason("has no tensor parallelism", "parallel.tp: 1"))
        if requirements.task not in self.tasks:
            reasons.append(Reason(f"serves {' and '.join(self.tasks)}, not {requirements.task}", f"model.task: {self.tasks[0]}"))
        return reasons


@dataclass(frozen=True, slots=True)
class ModelRequirements:
    """What a checkpoint and a configuration ask of a model plugin."""

    architecture: str
    tp: int = 1
    task: Task = "generate"


def is_classifier(architecture: str) -> bool:
    """Whether the checkpoint has a head over labels, by the name that its `config.json` gives."""
    return architecture.endswith("ForSequenceClassification")


def checkpoint_tasks(architecture: str) -> tuple[Task, ...]:
    """What a checkpoint can be asked for, by its architecture's name: a body alone embeds, a head over labels classifies, and a language
    model does everything."""
    if is_classifier(architecture):
        return ("classify",)
    return ("embed",) if architecture.endswith("Model") and "LMHead" not in architecture else ("generate", "embed", "classify")


class LazyTensor(Protocol):
    """A tensor of a checkpoint that is read (mmapped) only as far as it is sliced."""

    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> torch.Tensor: ...


class Model(ABC):
    """A model, built on the meta device from facts and a build context, which also holds the task that it is built for.

    Laws:
    - `forward` reads nothing but the batch and its own parameters, and returns hidden states after the final norm: of all tokens, or
      if the model `supports_token_selection`, of the batch's `SelectedTokens` where it has them.
    - `logits` is called with the rows that need logits only. A decoder that generates (or is asked for label tokens) returns the full
      vocabulary on every rank, a sequence classifier its labels. A model for embeddings is not asked.
    - `load_weights` consumes every (name, tensor) it is given and returns the names of parameters it set, so that the loader
      can name what is missing; a name that it does not know is an error, unless `ignored` matches it.
    Implementations also derive from `torch.nn.Module`. One whose record has `options` gets them as a third constructor argument.
    """

    ignored: ClassVar[tuple[str, ...]] = ()  # regular expressions of checkpoint names that are left out on purpose
    # leaves out of the last layer what only other tokens than the wanted ones have use for
    supports_token_selection: ClassVar[bool] = False

    def __init__(self, model_config: ModelConfig, context: BuildContext) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """-> hidden states [tokens or wanted tokens, hidden_size]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size], of a sequence classifier [n, labels]."""
        raise TypeError(f"{type(self).__name__} has no head")

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        """Set the parameters from a checkpoint's tensors, each sliced to this rank's part."""


class CausalLM(Model):
    """A decoder with a head over the vocabulary."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size]."""
