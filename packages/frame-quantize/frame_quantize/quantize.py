"""Quantization by the library llmcompressor, which writes compressed-tensors checkpoints."""

from __future__ import annotations

import json
import re
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from datasets import Dataset
from llmcompressor import model_free_ptq, oneshot
from llmcompressor.logger import LoggerConfig, configure_logger
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from frame_quantize.schemes import UNQUANTIZED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

configure_logger(LoggerConfig(console_log_level="WARNING", metrics_disabled=True))  # progress bars tell enough


def check_device(name: str | None) -> None:
    """Raises ValueError for a device that PyTorch does not know or cannot use here."""
    if name is None:
        return
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        raise ValueError(f"--device {name} is no device that PyTorch can use here: name another one, such as cpu.") from None


def check_model(model: str) -> None:
    """Raises ValueError for a checkpoint that is quantized already, OSError if there is none."""
    config, _ = PretrainedConfig.get_config_dict(model)
    if found := config.get("quantization_config"):
        raise ValueError(f"MODEL {model} is quantized already ({found.get('quant_method')}): give the unquantized checkpoint.")


def read_samples(file: Path, count: int) -> list[str]:
    """At most `count` texts: the field `text` of JSON Lines, or lines. Raises ValueError that names
    the line."""
    texts: list[str] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(texts) == count:
                break
            if not line.strip():
                continue
            if file.suffix == ".jsonl":
                try:
                    found = json.loads(line)
                except ValueError:
                    raise ValueError(f"{file}:{number} is no JSON object.") from None
                if not isinstance(found, dict) or not isinstance(found.get("text"), str):
                    raise ValueError(f"{file}:{number} has no field `text` with a string.")
                texts.append(found["text"])
            else:
                texts.append(line.strip())
    if not texts:
        raise ValueError(f"{file} has no text: give sample texts, 128 or more.")
    return texts


def quantize_weights(
    model: str, out: Path, weights: Mapping[str, Any], activations: Mapping[str, Any] | None, ignore: Sequence[str], device: str | None
) -> None:
    """Round each weight to nearest, shard by shard: needs the memory of one shard. Raises
    ValueError for a weight whose sizes the scheme does not divide."""
    _check_sizes(Path(model), weights, _ignored(ignore))
    config = QuantizationConfig(config_groups={"group_0": _scheme(weights, activations)}, ignore=_ignored(ignore))
    model_free_ptq(model, out, config=config, device=device)


def _check_sizes(folder: Path, weights: Mapping[str, Any], ignored: Sequence[str]) -> None:
    """Raises ValueError for a layer of a folder whose number of inputs integers cannot have: the
    library packs 32 at a time."""
    if weights["type"] != "int":
        return
    step = lcm(32, weights.get("group_size") or 1)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                layer, shape = name.removesuffix(".weight"), file.get_slice(name).get_shape()
                is_kept = layer == name or any(re.match(pattern.removeprefix("re:"), layer) for pattern in ignored)
                if len(shape) == 2 and not is_kept and shape[1] % step:
                    raise ValueError(
                        f"{layer} has {shape[1]} inputs, no multiple of {step}: name it with --ignore, "
                        f"{'choose another --group-size, ' if 'group_size' in weights else ''}or choose --method fp8."
                    )


def quantize_calibrated(
    model: str, out: Path, method: str, weights: Mapping[str, Any], ignore: Sequence[str], texts: Sequence[str], max_length: int,
    device: str | None, cache: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Quantize with the activations of `texts`, decoder layer by decoder layer: GPTQ or AWQ. The
    model is loaded by transformers. `cache`: the scheme of the KV cache whose scales are
    calibrated too."""
    if method == "awq" and not torch.accelerator.is_available():
        raise ValueError("awq needs a GPU, as llmcompressor pins its memory: choose gptq, which also runs on a CPU.")
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", trust_remote_code=False, device_map=device)
    tokens = [tokenizer(text, truncation=True, max_length=max_length) for text in texts]
    samples = Dataset.from_list([{"input_ids": each["input_ids"], "attention_mask": each["attention_mask"]} for each in tokens])
    options = {"config_groups": {"group_0": _scheme(weights, None)}, "ignore": _ignored(ignore), "kv_cache_scheme": cache}
    recipe = [GPTQModifier(**options)] if method == "gptq" else [AWQModifier(), QuantizationModifier(**options)]
    oneshot(
        model=loaded, tokenizer=tokenizer, dataset=samples, recipe=recipe, max_seq_length=max_length, num_calibration_samples=len(texts)
    )
    loaded.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)


def _scheme(weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> QuantizationScheme:
    inputs = None if activations is None else dict(activations)
    return QuantizationScheme(targets=["Linear"], weights=dict(weights), input_activations=inputs)


def _ignored(further: Sequence[str]) -> list[str]:
    """The patterns of compressed-tensors, which match from the start of a name."""
    return [*UNQUANTIZED, *(f"re:.*(?:{pattern})" for pattern in further)]
