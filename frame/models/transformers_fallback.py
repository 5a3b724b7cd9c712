"""Serves any decoder of the installed transformers over the paged cache: its attention modules call
our attention backend. A decoder with encoders of images is loaded with them.

transformers builds the model and maps the checkpoint's names. Tokens are passed flattened, as one
sequence of batch size 1. Independent of the architecture, but for `_WINDOWS_OF_MASKS`; those whose
attention does not go through transformers' attention interface are refused.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from frame.core.errors import CheckpointError, ConfigurationError
from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.media import MediaRows
from frame.core.interfaces.model import CausalLM
from frame.models.transformers_media import WholeModelEncoders, build_config, check_encoders, find_decoder, has_encoders
from frame.models.transformers_parallel import find_row_split, split_model
from frame.models.transformers_quantized import build_layers, load_layers, replace_layers
from frame.models.transformers_rotary import fix_rotations

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext, LoadCode
    from frame.core.interfaces.model import LazyTensor, ModelConfig, ModelContext

_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}  # of layers; a model with other ones masks keys by itself
_WINDOWS_OF_MASKS = ("PhimoeForCausalLM",)  # whose window transformers applies in the mask alone
_INTERFACE = "frame_paged"  # name under which `attend` is registered in transformers' attention functions
_LOADING = threading.Lock()  # `from_pretrained` replaces methods of transformers' classes while it runs, and puts back what it found


class TransformersForCausalLM(CausalLM, nn.Module):
    """A model of transformers: multi-head attention, its linear layers quantized where the format
    says so. Several ranks by the model's own plan."""

    def __init__(self, context: ModelContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        model_config = context.model_config
        self.model_config = model_config
        self.context = context
        self.architecture = find_architecture(model_config, context.load_code)
        self.attention = PagedAttention(model_config, context)
        self.has_encoders = has_encoders(model_config)
        # (base model, tail); a tuple, so that torch does not register them a second time
        self.parts: tuple[Any, ...] = ()
        self.encoders: tuple[WholeModelEncoders, ...] = ()  # one, or none for text alone

    @property
    def encoder_width(self) -> int:
        return self.model_config.hidden_size

    def encode(self, modality: str, items: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        return self.encoders[0].encode(modality, items)

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the checkpoint's tensors, for dummy weights."""
        with torch.device("meta"):
            model = self._build_with_config(self.architecture)
        return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        state = {self._rename(name): tensor for name, tensor in weights}  # transformers reads each tensor when it converts it
        with torch.device("meta"):
            model = self._build_with_config(self.architecture)
            layers = build_layers(self.context, model, find_decoder(model) if self.has_encoders else model)
        load_layers(self.context, layers, state)

        def load(config: Any) -> Any:
            options = {"config": config, "state_dict": state, "dtype": self.context.dtype, "output_loading_info": True}
            return self.architecture.from_pretrained(None, trust_remote_code=self.context.load_code is not None, **options)

        with _LOADING, _quiet():
            model, report = self._build_with_config(load)
        _check_loading(report)
        replace_layers(model, layers)
        if self.context.tp.size > 1:
            split_model(model, self.context.tp, layers)
        self.model = model.to(self.context.device).eval()
        decoder = self._take_decoder(model) if self.has_encoders else model.base_model
        fix_rotations(decoder, self.context.limits.max_context, self.context.dtype)
        self.parts = (decoder, _tail(model))
        self.attention.attach_modules(decoder, find_row_split(model) if self.context.tp.size > 1 else frozenset())
        return {name for name, _ in self.named_parameters()}

    def _rename(self, name: str) -> str:
        """transformers 4 has the language model of an architecture with encoders around its base
        model; quantized layers are found by the names of transformers 5."""
        old = "language_model.model."
        return f"model.language_model.{name.removeprefix(old)}" if self.has_encoders and name.startswith(old) else name

    def _take_decoder(self, model: Any) -> Any:
        """The language model in a model, whose encoders are kept if media are served."""
        decoder = find_decoder(model)
        if self.context.media is not None:
            self.encoders = (WholeModelEncoders(self.context, model.base_model),)
            return decoder
        for name, child in [*model.base_model.named_children()]:
            if child is not decoder:
                delattr(model.base_model, name)
        return decoder

    @torch.no_grad()
    def process_weights_after_loading(self) -> None:
        """Run two tokens without a cache, to record each layer's attention shape. Raises
        ConfigurationError if a layer does not call `attend` with the shape of the cache."""
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.context.device)
        with self.attention.use_batch(None):
            try:
                self._hidden({"input_ids": ids}, torch.arange(2, device=self.context.device)[None])
            except RuntimeError as error:
                if self.context.tp.size == 1:
                    raise
                raise ConfigurationError(
                    f"{self.model_config.architecture} does not compute with {self.context.tp.size} ranks' parts of its layers "
                    f"({error}): set parallel.tp: 1."
                ) from error
        self.attention.check_layers()

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        ids, media = batch.token_ids, batch.get(MediaRows)
        inputs = {"input_ids": ids[None]}
        if media is not None:
            inputs = {"inputs_embeds": media.place(self.parts[0].get_input_embeddings()(ids))[None]}
        with self.attention.use_batch(batch):
            return self._hidden(inputs, batch.positions[None])

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.parts[1](inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def _hidden(self, inputs: Mapping[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
        out = self.parts[0](**inputs, position_ids=positions, use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def _build_with_config(self, build: Any) -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(_INTERFACE, attend)
        if self.has_encoders:
            config = build_config(self.model_config, self.architecture, _INTERFACE)
        else:
            stored = {key: value for key, value in self.model_config.config.items() if key not in ("model_type", "quantization_config")}
            config = self._config_class()(**stored)
            config._attn_implementation = _INTERFACE  # noqa: SLF001 - documented by transformers
        config.dtype = self.context.dtype
        text = config.get_text_config()
        if getattr(text, "use_bidirectional_attention", None):  # transformers drops its mask for our interface
            raise ConfigurationError(f"{self.model_config.architecture} attends in both directions, which the fallback does not compute.")
        if unknown := sorted(set(getattr(text, "layer_types", None) or ()) - _KINDS):
            raise ConfigurationError(
                f"{self.model_config.architecture} has layers of kind {', '.join(unknown)}, which the fallback does not compute."
            )
        return build(config)

    def _config_class(self) -> Any:
        """The checkpoint's own configuration class, if its code may run and it names one; otherwise
        that of the model type."""
        from transformers import CONFIG_MAPPING

        reference = _find_remote_code(self.model_config, "AutoConfig")
        if reference is not None and self.context.load_code is not None:
            return self.context.load_code("configuration", reference)
        kind = self.model_config.config["model_type"]
        if kind in CONFIG_MAPPING:  # a lazy mapping, whose `get` finds only classes that are already imported
            return CONFIG_MAPPING[kind]
        return self.architecture.config_class


class PagedAttention:
    """What the attention modules of one model share: the step's batch, the backend, and each
    layer's spec as recorded."""

    def __init__(self, model_config: ModelConfig, context: BuildContext) -> None:
        if context.attention is None:
            raise TypeError("the build context of a model needs an attention backend")
        self.model_config = model_config
        self.backend = context.attention
        self.tp = context.tp
        self.batch: ForwardBatch | None = None
        self.specs: dict[int, AttentionSpec] = {}
        self._gathered: set[nn.Module] = set()  # attention that the plan leaves whole, as it does for experts alone

    def attach_modules(self, model: nn.Module, split: Set[nn.Module] = frozenset()) -> None:
        """Set this object on every module that has a layer index. split: the modules that take a
        part of their input on each rank."""
        self._gathered.clear()
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.frame_attention = self  # type: ignore[assignment]
                if split.isdisjoint(module.modules()):
                    self._gathered.add(module)

    @contextlib.contextmanager
    def use_batch(self, batch: ForwardBatch | None) -> Iterator[None]:
        """A context in which attention uses `batch`; None: no cache, shapes are recorded."""
        self.batch = batch
        try:
            yield
        finally:
            self.batch = None

    def check_layers(self) -> None:
        """Raises ConfigurationError if the recorded layers differ from those that the cache is made
        for."""
        model_config, name = self.model_config, self.model_config.architecture
        if sorted(self.specs) != list(range(model_config.num_layers)):
            raise ConfigurationError(
                f"{name} computes attention outside of transformers' interface in some layers ({len(self.specs)} of "
                f"{model_config.num_layers} use it), so it cannot run over the paged cache."
            )
        able = self.backend.capabilities
        for layer, spec in self.specs.items():
            shapes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim)
            heads, kv_heads = (count // self.tp.size for count in (model_config.num_heads, model_config.num_kv_heads))
            if shapes != (heads, kv_heads, model_config.head_dim, model_config.v_head_dim):
                raise ConfigurationError(
                    f"{name} has attention of another shape in layer {layer} {shapes}; the paged cache needs layers of equal shape."
                )
            for used, can, what in (
                (spec.sliding_window, able.sliding_window, "a sliding window"),
                (spec.soft_cap, able.soft_cap, "a soft cap of scores"),
                (spec.sinks is not None, able.sinks, "attention sinks"),
            ):
                if used and not can:
                    raise ConfigurationError(f"{name} uses {what}, which the attention backend does not support: choose another backend.")
        self.backend.prepare(list(self.specs.values()))

    def run(self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """q [1, heads, tokens, dim], k and v [1, kv heads, tokens, dim] -> [1, tokens, heads,
        v_dim]."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        heads = q.shape[1]
        is_whole = self.tp.size > 1 and heads == self.model_config.num_heads
        if is_whole:  # the plan gathers the heads before attention, or leaves it whole
            q, k, v = (tensor.chunk(self.tp.size, 1)[self.tp.rank] for tensor in (q, k, v))
            if (sinks := options.get("s_aux")) is not None:
                options = {**options, "s_aux": sinks.chunk(self.tp.size)[self.tp.rank]}
        out = self._run(layer, q, k, v, options)
        if not is_whole:
            return out
        if module in self._gathered:
            return self.tp.all_gather(out.flatten(2)).unflatten(2, (heads, -1))
        whole = out.new_zeros(*out.shape[:2], heads, out.shape[3])
        whole.chunk(self.tp.size, 2)[self.tp.rank].copy_(out)
        return whole

    def _run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """`run` of this rank's heads."""
        if self.batch is None:
            if layer in self.specs and len(self.specs) == self.model_config.num_layers:
                self.specs = {}  # recorded before; new weights may have new sinks
            self.specs[layer] = _make_spec(layer, self.model_config, (q, k, v), options)
            return v.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])
        spec = self.specs[layer]
        q, k, v = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)
        if not self.backend.capabilities.stores_kv:
            self.batch.store_kv(spec, k, v)
        return self.backend.run(spec, q, k, v, self.batch)[None]


class _HiddenStates(nn.Module):
    """Replaces the base model where only the head after it runs."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **options: Any) -> _HiddenOutput:
        return _HiddenOutput(inputs_embeds)

    @property
    def decoder(self) -> _HiddenStates:
        """OPT calls its base model's decoder directly."""
        return self


class _HiddenOutput:
    """A base model's output: hidden states, and None for every other attribute."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: calls the object attached to the module. Parameters have
    the names of transformers, whose modules pass some by name."""
    attention: PagedAttention = module.frame_attention  # type: ignore[assignment]
    if attention_mask is not None:
        raise ConfigurationError(f"{type(module).__name__} masks keys by itself, which the fallback does not compute.")
    return attention.run(module, query, key, value, options), None


def find_architecture(model_config: ModelConfig, load_code: LoadCode | None = None) -> Any:
    """The class that serves the model: the checkpoint's own if its code may run, otherwise that of
    transformers. Raises ConfigurationError if there is none, or if it cannot run over the paged
    cache."""
    import transformers

    name, reference = model_config.architecture, _find_remote_code(model_config, "AutoModelForCausalLM")
    if reference is not None and load_code is not None:
        code = load_code("model", reference)
    else:
        code = getattr(transformers, name, None)
    if code is None or not hasattr(code, "from_pretrained"):
        version = transformers.__version__
        remedy = "install a newer one" if reference is None else "its checkpoint brings Python code for it, see --trust-remote-code"
        raise ConfigurationError(f"{name} is neither implemented here nor known to transformers {version}: {remedy}.")
    if has_encoders(model_config):
        check_encoders(model_config, code)
    if model_config.kind != "mha":
        raise ConfigurationError(f"{name} uses latent attention, which runs through its own implementation only.")
    kinds = set(model_config.config.get("layer_types") or model_config.config.get("layers_block_type") or ())
    if getattr(code, "_is_stateful", False) or kinds & {"linear_attention", "mamba", "recurrent"}:
        raise ConfigurationError(f"{name} keeps a recurrent state for each sequence, which the fallback does not store.")
    if not getattr(code, "_supports_attention_backend", False):
        raise ConfigurationError(
            f"{name} does not compute attention through transformers' interface, so it cannot run over the paged cache."
        )
    return code


def _find_remote_code(model_config: ModelConfig, kind: str) -> str | None:
    """The reference that the checkpoint's `auto_map` has for one of transformers' auto classes."""
    named = model_config.config.get("auto_map")
    reference = named.get(kind) if isinstance(named, dict) else None
    return reference if isinstance(reference, str) else None


def _make_spec(layer: int, model_config: ModelConfig, inputs: tuple[torch.Tensor, ...], options: dict[str, Any]) -> AttentionSpec:
    q, k, v = inputs
    scale = options.get("scaling")
    return AttentionSpec(
        layer=layer,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[3],
        v_head_dim=v.shape[3],
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        sliding_window=_find_window(layer, model_config, options),
        soft_cap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )


def _find_window(layer: int, model_config: ModelConfig, options: dict[str, Any]) -> int | None:
    """The window that the layer passes, else that of its kind in the config. Raises
    ConfigurationError for chunked attention."""
    kinds = model_config.config.get("layer_types") or ()
    kind = kinds[layer] if layer < len(kinds) else None
    if kind == "chunked_attention":
        raise ConfigurationError(f"{model_config.architecture} attends in chunks, which the fallback does not compute.")
    window: int | None = options.get("sliding_window")
    has_window = kind == "sliding_attention" or model_config.architecture in _WINDOWS_OF_MASKS
    return model_config.sliding_window if window is None and has_window else window


def _tail(model: Any) -> Any:
    """The causal model with its base model replaced by given hidden states: head, soft caps and
    scales as in transformers."""
    tail = copy.copy(model)
    tail.__dict__["_modules"] = dict(model._modules)  # noqa: SLF001 - a shallow copy would share its children
    tail._modules[model.base_model_prefix] = _HiddenStates()  # noqa: SLF001
    return tail


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Disable transformers' progress bar, which would also be written to log files."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _check_loading(report: dict[str, Any]) -> None:
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    wrong = sorted(report["mismatched_keys"])
    if wrong:
        name, stored, expected = wrong[0]
        raise CheckpointError(
            f"{name} has the shape {list(stored)}, but {list(expected)} is expected", "check that config.json belongs to this checkpoint."
        )
    if missing:
        raise CheckpointError(f"the checkpoint lacks {missing[0]} ({len(missing)} parameters in all): check that it is complete.")
    if unexpected:
        raise CheckpointError(
            f"the checkpoint holds {unexpected[0]}, which the model does not have", "check that config.json belongs to this checkpoint."
        )
