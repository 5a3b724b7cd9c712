"""Reads a checkpoint's `config.json` and `generation_config.json` into a `ModelConfig`, for every
architecture and without torch.

Used before plugins are chosen. Knows the synonyms of configuration keys; it must not know how
models compute. `rope_scaling` and `rope_parameters` are passed on unchanged.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from frame.checkpoint.config_defaults import CONTEXT, EXPERTS, HEAD_DIM, KV_HEADS, NESTED_SIZES, add_defaults
from frame.checkpoint.config_fields import check_fields, check_layer_list
from frame.checkpoint.folder import check_folder, read_object
from frame.checkpoint.hub_cache import find_cache, find_name, find_snapshot
from frame.checkpoint.sentence_transformers import read_sentence_config
from frame.core.errors import CheckpointError
from frame.core.interfaces.model import ModelConfig, is_classifier
from frame.host.installation import describe_gguf

WHISPER = "WhisperForConditionalGeneration"
DESCRIPTION = "hf_quant_config.json"  # NVIDIA ModelOpt's, of a quantization that config.json may lack
GGUF = "gguf"  # the quantization of a folder whose weights are a GGUF file
EMBEDDED = "frame-tiny"  # the model that ships with the package

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
# Sizes that resolving and models read besides those of `ModelConfig`.
_OTHER_SIZES = (
    "intermediate_size", "moe_intermediate_size", "num_experts_per_tok", "n_shared_experts", "kv_lora_rank", "q_lora_rank",
    "qk_rope_head_dim", "num_nextn_predict_layers",
)  # fmt: skip
_MAXIMUM = 2**31 - 1  # of any count
_MAX_ENTRIES = 2**24  # of a vector, a vocabulary or a layer's heads; products of two fit into an address space
_MAX_HEAD = 2**16  # entries of an attention head, whose rotary tables have as many for each position; labels
_MAX_LAYERS = 1_000  # each is an object, built before weights are looked for
_MAX_EXPERTS = 200_000  # of all layers; the same holds for them
_ENCODER_CONFIGS = ("vision_config", "audio_config")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_INHERITED = ("architectures", "quantization_config", "tie_word_embeddings", "eos_token_id", "torch_dtype", "dtype", "auto_map")
_SCALED_ROPE = ("linear", "dynamic", "yarn")
_DTYPES = ("float32", "bfloat16", "float16")

_DECODER_SIZES: Mapping[str, str] = {
    "num_hidden_layers": "decoder_layers", "num_attention_heads": "decoder_attention_heads", "intermediate_size": "decoder_ffn_dim",
}  # fmt: skip
_WINDOW_IS_OPT_IN = (
    "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text",
    "qwen3_vl_moe_text",
)  # fmt: skip


def find_model(path: str) -> Path:
    """The folder of `model.path`: that of the embedded model for its name, the snapshot in the
    cache for a name on a hub, else the path itself. Downloads nothing."""
    if path == EMBEDDED:
        return Path(__file__).resolve().parents[1] / "models" / EMBEDDED.replace("-", "_")
    name = find_name(path)
    if name is not None and (snapshot := find_snapshot(name)) is not None:
        return snapshot
    return Path(path).expanduser().absolute()


def name_model(path: str) -> str:
    """The name in the API of the model at `model.path`, by default."""
    name = find_name(path)
    if name is not None:
        return name.repository
    return EMBEDDED if path == EMBEDDED else find_model(path).name


def describe_missing(path: str) -> str:
    """What to do about a path that is no folder: the command for a name on a hub."""
    name = find_name(path)
    if name is None:
        return "give the folder of a checkpoint in Hugging Face layout"
    return f"the cache ({find_cache()}) has no model of that name either: run `frame pull {name}`, or add --download"


def read_model_config(path: str | Path, setting: str = "model.path") -> ModelConfig:
    """Read the configuration of the checkpoint `path`: a folder in Hugging Face layout, or the
    embedded model's name. setting: that names it.

    Raises CheckpointError, one sentence, if the folder or file is missing, is no JSON object or
    lacks a required key.
    """
    folder = find_model(str(path))
    if not folder.is_dir():
        if folder.suffix == ".gguf" and folder.is_file():
            raise CheckpointError(
                f"{setting} {str(path)!r} is a GGUF file; give its folder, with config.json and the tokenizer of the model that it was "
                f"made from{describe_gguf()}."
            )
        if folder.is_file():
            raise CheckpointError(f"{setting} {str(path)!r} is a file; give its folder, which also holds config.json and the tokenizer.")
        raise CheckpointError(f"{setting} {str(path)!r} is no folder; {describe_missing(str(path))}.")
    check_folder(folder)
    raw = read_object(folder / "config.json")
    if raw is None and any(folder.glob("*.gguf")):
        raise CheckpointError(
            f"{folder} holds a GGUF file and no config.json; copy config.json and the tokenizer of the model that it was made from into "
            f"the folder{describe_gguf()}."
        )
    if raw is None:
        raise CheckpointError(f"{folder} holds no config.json; give the folder of a checkpoint in Hugging Face layout.")
    end = {"eos_token_id": raw.get("im_end_token_id")}  # Qwen3-Omni's, whose files may have no other
    raw = _select_thinker(raw)
    text = _select_text_config(raw)
    generation = read_object(folder / "generation_config.json") or {}
    if not text.get("quantization_config") and (described := _read_description(folder / DESCRIPTION)):
        text = {**text, "quantization_config": described}
    if any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")):
        text = {**text, "quantization_config": {"quant_method": GGUF}}
    text = add_defaults(text)
    if text.get("architectures") == [WHISPER]:  # whose `num_hidden_layers` counts those of the encoder
        text |= {new: text[old] for new, old in _DECODER_SIZES.items() if old in text}
        text["alignment_heads"] = _read_alignment_heads(generation.get("alignment_heads"), text)
    model_config = _Reader(folder / "config.json", text).model_config(eos=_eos_ids(generation, text, raw) or _eos_ids(end))
    full_config = _drop_deepstack(raw) if any(name in raw for name in _ENCODER_CONFIGS) else {}
    has_processor = any((folder / name).is_file() for name in _PROCESSORS)
    sentence, sampling = read_sentence_config(folder), _read_sampling(folder, generation)
    return replace(model_config, sentence=sentence, sampling=sampling, full_config=full_config, has_processor=has_processor)


def _read_sampling(folder: Path, generation: Mapping[str, Any]) -> dict[str, int | float]:
    """The sampling parameters of generation_config.json, as vLLM and SGLang read them: also without
    `do_sample`."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: generation[name] for name in names if generation.get(name) is not None}
    for name, value in values.items():
        if type(value) not in (int, float):
            raise CheckpointError(f"{folder / 'generation_config.json'}: {name} is {value!r:.80}; it must be a number.")
    return values


def _drop_deepstack(raw: dict[str, Any]) -> dict[str, Any]:
    """config.json without the layers that Qwen3.5, unlike Qwen3-VL, adds no encoder outputs to."""
    vision = raw.get("vision_config")
    if not str(raw.get("model_type")).startswith("qwen3_5") or not isinstance(vision, dict):
        return raw
    return {**raw, "vision_config": {name: value for name, value in vision.items() if name != "deepstack_visual_indexes"}}


def _read_alignment_heads(value: Any, config: Mapping[str, Any]) -> list[list[int]]:
    """The [layer, head] pairs of a Whisper decoder whose cross-attention follows the audio; empty
    where generation_config.json has none, or some that the decoder does not have."""
    sizes = config.get("decoder_layers"), config.get("decoder_attention_heads")
    pairs = value if isinstance(value, list) else []
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(index) is int for index in (*pair, *sizes))):
            return []
        if not all(0 <= index < size for index, size in zip(pair, sizes, strict=True)):
            return []
    return sorted({tuple(pair): pair for pair in pairs}.values())


def check_head(path: str, field: str) -> None:
    """Raise CheckpointError unless `path` is the folder of a head that drafts: its config.json has
    `field`."""
    file = find_model(path) / "config.json"
    if file.parent.is_dir():
        check_folder(file.parent)
    raw = read_object(file)
    if raw is None or field not in raw:
        problem = "is missing" if raw is None else f"has no {field}"
        raise CheckpointError(f"speculative.draft_model_path: {file} {problem}; name the folder of a head for speculative.algorithm.")


class _Reader:
    """Reads one configuration by synonyms of its keys; errors name the file."""

    def __init__(self, file: Path, config: dict[str, Any]) -> None:
        self.file = file
        self.config = config

    def model_config(self, eos: tuple[int, ...]) -> ModelConfig:
        config = self.config
        if config.get("is_encoder_decoder"):
            if self._architecture() != WHISPER:
                raise CheckpointError(
                    f"{self.file}: {self._architecture()} is an encoder-decoder model, of which only {WHISPER} is served; "
                    "all others must be decoders or encoders."
                )
            for name in ("max_source_positions", "num_mel_bins", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"):
                self._count((name,))
        check_fields(self.file, config)
        check_layer_list(self.file, config, self._num_layers())
        for name in _OTHER_SIZES:
            self._count((name,), default=0, maximum=_MAX_ENTRIES)
        heads = self._count(_HEADS, maximum=_MAX_ENTRIES)
        hidden = self._count(_HIDDEN, minimum=1, maximum=_MAX_ENTRIES)
        kind, latent, head_dim, v_head_dim = self._head_sizes(hidden, heads)
        return ModelConfig(
            architecture=self._architecture(),
            num_layers=self._num_layers(),
            hidden_size=hidden,
            vocab_size=self._count(("vocab_size",), maximum=_MAX_ENTRIES),
            num_heads=heads,
            num_kv_heads=heads if kind == "mla" else self._kv_heads(heads),
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            kind=kind,
            latent=latent,
            other_head_dims=self._other_head_dims(head_dim),
            max_context=self._max_context(),
            dtype=_dtype(config.get("dtype") or config.get("torch_dtype")),
            num_experts=self._count(EXPERTS, default=0, maximum=_MAX_EXPERTS // self._num_layers()),
            sliding_window=self._sliding_window(),
            quantization=self._quantization(),
            eos_token_ids=eos,
            labels=self._labels(),
            config=config,
        )

    def _count(self, names: Iterable[str], default: int | None = None, minimum: int = 0, maximum: int = _MAXIMUM) -> int:
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
                sent = reprlib.repr(value)
                raise CheckpointError(f"{self.file}: {name} is {sent}; it must be a whole number from {minimum} to {maximum}.")
            return value
        if default is None:
            raise CheckpointError(f"{self.file} has no {' or '.join(names)}; it is not the config.json of a causal language model.")
        return default

    def _num_layers(self) -> int:
        """The number of layers, or the length of the list of their kinds."""
        kinds = self.config.get("layers_block_type") or self.config.get("hybrid_override_pattern")
        return self._count(_LAYERS, default=len(kinds) if isinstance(kinds, (list, str)) else None, minimum=1, maximum=_MAX_LAYERS)

    def _architecture(self) -> str:
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise CheckpointError(f'{self.file} names no architecture; add for example "architectures": ["LlamaForCausalLM"].')
        return names[0]

    def _labels(self) -> tuple[str, ...]:
        """The names of a sequence classifier's outputs; without `id2label`, LABEL_0 and so on, as
        in transformers."""
        if not is_classifier(self._architecture()):
            return ()
        names = self.config.get("id2label")
        if isinstance(names, Mapping) and names:
            return tuple(str(names[key]) for key in sorted(names, key=lambda key: int(key) if str(key).isdigit() else 0))
        return tuple(f"LABEL_{number}" for number in range(self._count(("num_labels",), default=2, maximum=_MAX_HEAD)))

    def _kv_heads(self, heads: int) -> int:
        if self.config.get("multi_query") is True and not self.config.get("new_decoder_architecture"):
            return 1
        return self._count(KV_HEADS, default=heads, maximum=_MAX_ENTRIES)

    def _head_sizes(self, hidden: int, heads: int) -> tuple[Literal["mha", "mla"], tuple[int, int] | None, int, int]:
        rank, rope = self.config.get("kv_lora_rank"), self.config.get("qk_rope_head_dim")
        if rank and rope:
            nope, value = self._count(("qk_nope_head_dim",)), self._count(("v_head_dim",))
            return "mla", (int(rank), int(rope)), nope + int(rope), value
        size = self._count(HEAD_DIM, default=0, maximum=_MAX_HEAD)
        if not size:
            if not heads or hidden % heads:
                raise CheckpointError(f"{self.file}: hidden size {hidden} is not a multiple of {heads} heads, and there is no head_dim.")
            size = hidden // heads
        return "mha", None, size, self._count(("v_head_dim",), default=size)

    def _other_head_dims(self, head_dim: int) -> tuple[int, ...]:
        """The head sizes of layers that differ, as Gemma 4 has them."""
        layers = self.config.get("per_layer_config")
        sizes = [each.get("head_dim") for each in layers.values()] if isinstance(layers, Mapping) else [self.config.get("global_head_dim")]
        return tuple(sorted({size for size in sizes if isinstance(size, int)} - {head_dim}))

    def _max_context(self) -> int:
        """The longest context that the model was trained for, or to which rope scaling extends it,
        in tokens."""
        base = self._count(CONTEXT, default=2048)
        if "Roberta" in self._architecture():  # positions start after the padding id
            return base - self._count(("pad_token_id",), default=1) - 1
        rope = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        if isinstance(rope, Mapping) and rope and all(isinstance(value, Mapping) for value in rope.values()):
            rope = rope.get("full_attention", {})  # one entry for each kind of layer
        if not isinstance(rope, Mapping) or (rope.get("rope_type") or rope.get("type")) not in _SCALED_ROPE:
            return base
        original, factor = rope.get("original_max_position_embeddings") or base, rope.get("factor") or 1.0
        if not all(isinstance(value, int | float) and 0 < value <= _MAXIMUM for value in (original, factor)):
            raise CheckpointError(
                f"{self.file}: original_max_position_embeddings and factor of the scaled rope must be numbers from 0 to {_MAXIMUM}."
            )
        return max(base, int(original * factor))

    def _sliding_window(self) -> int | None:
        family = str(self.config.get("model_type", ""))
        if "attention_chunk_size" in self.config:
            return self._count(("attention_chunk_size",), default=0) or None
        window = self.config.get("sliding_window")
        if not self.config.get("use_sliding_window", family not in _WINDOW_IS_OPT_IN):
            return None
        layers = self.config.get("layer_types")
        if isinstance(layers, list) and "sliding_attention" not in layers:
            return None
        return window if isinstance(window, int) and window > 0 else None

    def _quantization(self) -> str | None:
        stored = self.config.get("quantization_config")
        if not stored:
            return None
        method = stored.get("quant_method") if isinstance(stored, Mapping) else None
        if not isinstance(method, str):
            raise CheckpointError(
                f"{self.file}: quantization_config has no quant_method, so the storage format of the weights is unknown: add it."
            )
        return method


def _read_description(file: Path) -> dict[str, Any] | None:
    """The `quantization_config` that NVIDIA ModelOpt's file stands for, with its producer as the
    method; None without a file, and for unquantized weights with scales of the KV cache alone."""
    raw = read_object(file)
    if raw is None:
        return None
    for name in ("quantization", "producer"):
        if not isinstance(raw.get(name), dict):
            raise CheckpointError(f"{file}: {name} is {reprlib.repr(raw.get(name))}; a JSON object is expected: download it again.")
    stored = raw["quantization"]
    return {**stored, "quant_method": raw["producer"].get("name")} if stored.get("quant_algo") else None


def _select_thinker(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the model that reads and writes text, where the checkpoint also has one
    that speaks (Qwen3-Omni); else the whole."""
    thinker = raw.get("thinker_config")
    if not isinstance(thinker, dict):
        return raw
    inherited = {key: raw[key] for key in _INHERITED if key in raw}
    return {**inherited, **thinker, "architectures": raw.get("architectures")}


def _select_text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's configuration: a nested one with the keys that it inherits, else the
    whole."""
    for name in _TEXT_CONFIGS:
        nested = raw.get(name)
        if isinstance(nested, dict) and nested:
            inherited = {key: raw[key] for key in _INHERITED if key in raw}
            text = {key: value for key, value in nested.items() if value is not None or key not in inherited}
            text = {**NESTED_SIZES.get(str(nested.get("model_type")), {}), **text}
            if raw.get("tie_word_embeddings"):  # of the head, which is in the outer model; a stored head is used in any case
                text["tie_word_embeddings"] = True
            return {**inherited, **text, "architectures": raw.get("architectures") or nested.get("architectures")}
    return raw


def _dtype(name: object) -> str:
    """The computing type: bfloat16 for other types (fp8 checkpoints), float32 where none is named,
    as in transformers."""
    if not isinstance(name, str):
        return "float32"
    plain = name.removeprefix("torch.")
    return plain if plain in _DTYPES else "bfloat16"


def _eos_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    eos: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        eos += [i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i not in eos]
    return tuple(eos)
