"""The forms of config.json in which checkpoints of one architecture are published: fields left out,
and rotary settings and windows as older versions of transformers wrote them. For the suite of
models. Must not know a model by name.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from frame.testing.checkpoints import make_checkpoint
from frame.testing.model.session import Checkpoint

# That change no result of a prompt, or say what the files are.
IGNORED = (
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range", "pretraining_tp",
    "output_router_logits", "router_aux_loss_coef", "attention_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "classifier_dropout",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "return_dict", "output_hidden_states", "is_encoder_decoder", "id2label",
    "label2id", "problem_type", "chunk_size_feed_forward", "output_attentions", "add_cross_attention", "is_decoder",
)  # fmt: skip
Config = dict[str, Any]
WINDOW = 24  # tokens
ROPES: tuple[Config, ...] = (
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "linear", "factor": 4.0},
)
DEEP = 7  # layers: of six, older versions make one another than the others


def list_forms(config: Mapping[str, Any]) -> Iterator[tuple[str, Config]]:
    """Each form of a configuration, with what differs. Sizes stay: without them it is another
    model."""
    for name, value in config.items():
        if name not in IGNORED and (isinstance(value, bool | float | str | list | dict) or "sliding_window" in name):
            yield f"without {name}", {key: each for key, each in config.items() if key != name}
    older = write_older(config)
    if older != config:
        yield "as older versions write it", older
    if "layer_types" in config and "sliding_window" in config:
        for pattern in (2, 3):
            plain = {key: value for key, value in older.items() if key != "layer_types"}
            yield f"with sliding_window_pattern {pattern} in place of layer_types", {**plain, "sliding_window_pattern": pattern}


def list_settings(config: Mapping[str, Any]) -> Iterator[list[Config]]:
    """Fields that published checkpoints set, in groups that can be set together. Fields that a
    configuration does not have are left out."""
    rope = config.get("rope_parameters") or {}
    is_plain = "rope_theta" in rope and rope.get("rope_type") == "default"
    ropes = [{"rope_parameters": {**rope, **scaling}} if is_plain else {} for scaling in ROPES]
    activation = {"hidden_act": "gelu_pytorch_tanh"} if config.get("hidden_act") == "silu" else {}
    biases = {name: True for name in ("attention_bias", "mlp_bias") if config.get(name) is False}
    sizes = {"head_dim": config["head_dim"] // 2} if isinstance(config.get("head_dim"), int) else {}
    window: Config = {"sliding_window": WINDOW} if "sliding_window" in config and not config["sliding_window"] else {}
    if "use_sliding_window" in config:
        window = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
    for group in ((ropes[0], activation, biases, sizes), (ropes[1], window), (ropes[2],)):
        if fields := [each for each in group if each]:
            yield fields


def write_older(config: Mapping[str, Any]) -> Config:
    """Rotary settings as fields of the configuration: `rope_theta`, `rope_scaling`, and
    `rope_local_base_freq` of layers with a window."""
    older = {key: value for key, value in config.items() if key != "rope_parameters"}
    ropes = config.get("rope_parameters") or {}
    for key, theta in (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")):
        if isinstance(ropes.get(key), dict):
            older |= _write_rope(ropes[key], theta)
    return older | (_write_rope(ropes, "rope_theta") if "rope_theta" in ropes else {})


def _write_rope(rope: Mapping[str, Any], theta: str) -> Config:
    written: Config = {theta: rope["rope_theta"]} if "rope_theta" in rope else {}
    if "partial_rotary_factor" in rope:
        written["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope.get("rope_type", "default") != "default":
        written["rope_scaling"] = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return written


def write_forms(checkpoint: Checkpoint, place: Path) -> Iterator[tuple[str, Path]]:
    """The folder of each form of a checkpoint, in `place`. Of a model with windows also one of more
    layers, without their list."""
    assert checkpoint.folder is not None, "a configuration alone has no other form"
    config = json.loads((checkpoint.folder / "config.json").read_text())
    for what, form in list_forms(config):
        yield what, write_form(checkpoint.folder, form, place)
    if config.get("sliding_window") and "layer_types" in config:
        architecture = checkpoint.model_config.architecture
        try:
            deep = make_checkpoint(architecture, place / "deep", num_hidden_layers=DEEP, layer_types=None)
        except ValueError:
            return  # a model whose layers refer to each other
        form = json.loads((deep / "config.json").read_text())
        yield f"with {DEEP} layers and without layer_types", write_form(deep, {k: v for k, v in form.items() if k != "layer_types"}, place)


def write_settings(checkpoint: Checkpoint, place: Path) -> Iterator[tuple[list[tuple[str, Path]], Iterator[tuple[str, Path]]]]:
    """For each group of fields: a checkpoint that sets all of them, and one for each field, for a
    model that refuses the first. transformers makes the weights; it cannot with any fields."""
    assert checkpoint.folder is not None, "a configuration alone has no other form"
    config = json.loads((checkpoint.folder / "config.json").read_text())

    def write(group: Sequence[Config]) -> Iterator[tuple[str, Path]]:
        for fields in group:
            with suppress(Exception):  # of any class, by the model
                folder = make_checkpoint(checkpoint.model_config.architecture, tempfile.mkdtemp(dir=place), **fields)
                yield f"with {' and '.join(f'{name} {value}' for name, value in fields.items())}", folder

    for group in list_settings(config):
        yield list(write([{name: value for fields in group for name, value in fields.items()}])), write(group)


def write_form(folder: Path, config: Config, place: Path) -> Path:
    """A new folder with another config.json for the same weights."""
    written = Path(tempfile.mkdtemp(dir=place))
    for file in folder.iterdir():
        if file.name != "config.json":
            (written / file.name).symlink_to(file.resolve())
    (written / "config.json").write_text(json.dumps(config))
    return written
