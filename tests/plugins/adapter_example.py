"""An adapter format as a file would bring it: adapters of MLX, whose factors are stored the other
way round and whose scale is no quotient. `frame serve --plugin adapter_example.py`."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import torch

from frame.interfaces.adapter import AdapterCapabilities, AdapterConfig, AdapterError, AdapterFormat, LowRankDelta

# What says how the adapter was trained.
TRAINING = {
    *(
        "adapter_path",
        "batch_size",
        "config",
        "data",
        "fine_tune_type",
        "grad_accumulation_steps",
        "grad_checkpoint",
        "iters",
        "lr_schedule",
    ),
    *("learning_rate", "lora_parameters", "mask_prompt", "max_seq_length", "model", "num_layers", "optimizer", "optimizer_config", "seed"),
    *("project_name", "report_to", "resume_adapter_file", "save_every", "steps_per_eval", "steps_per_report", "test", "test_batches"),
    *("train", "val_batches"),
}


class Parameters(msgspec.Struct, forbid_unknown_fields=True):
    rank: int
    scale: float
    dropout: float = 0.0
    keys: list[str] | None = None  # the layers that were trained


class Stored(msgspec.Struct):
    fine_tune_type: str
    lora_parameters: Parameters
    model: str = ""


class MlxAdapters(AdapterFormat):
    """`LAYER.lora_a` [inputs, rank] and `LAYER.lora_b` [rank, outputs]."""

    name: ClassVar[str] = "mlx"
    capabilities: ClassVar[AdapterCapabilities] = AdapterCapabilities(selects=(("fine_tune_type", "lora"),))

    def read_config(self, config):
        stored = self._read(config)
        return AdapterConfig(stored.lora_parameters.rank, stored.model)

    def read_deltas(self, config, tensors):
        parameters = self._read(config).lora_parameters
        layers = dict.fromkeys(name.rpartition(".lora_")[0] for name in tensors)
        if unknown := tensors.keys() - {f"{layer}.lora_{side}" for layer in layers for side in "ab"}:
            raise AdapterError(f"{min(unknown)} is no factor: fuse the adapter with mlx_lm.fuse and serve the result")
        if not layers:
            raise AdapterError("the adapter has no tensors: train it again")
        for layer in layers:
            a, b = (self._read_factor(f"{layer}.lora_{side}", tensors) for side in "ab")
            if not a.shape[1] == b.shape[0] == parameters.rank:
                raise AdapterError(f"{layer}.lora_a and {layer}.lora_b are not of rank {parameters.rank}: train the adapter again")
            yield layer, LowRankDelta(a.t(), b.t(), parameters.scale)

    def _read(self, config) -> Stored:
        if unknown := config.keys() - TRAINING:
            raise AdapterError(f"adapter_config.json: {min(unknown)} is unknown: remove it if it changes no product")
        try:
            stored = msgspec.convert(dict(config), Stored)
        except msgspec.ValidationError as error:
            raise AdapterError(f"adapter_config.json is invalid ({error}): train the adapter again") from None
        if stored.fine_tune_type != "lora" or stored.lora_parameters.rank < 1 or not abs(stored.lora_parameters.scale) < 1e6:
            raise AdapterError("adapter_config.json: fine_tune_type, rank or scale is invalid: train the adapter again")
        return stored

    @staticmethod
    def _read_factor(name, tensors) -> torch.Tensor:
        if name not in tensors or len(tensors[name].shape) != 2:
            raise AdapterError(f"{name} is missing or has no two dimensions: train the adapter again")
        values = tensors[name][...]
        if not values.is_floating_point() or not torch.isfinite(values).all():
            raise AdapterError(f"{name} has values that are no finite numbers: train the adapter again")
        return values

    @staticmethod
    def write_conformance_adapter(config, deltas) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        first = next(iter(deltas.values()))
        for delta in deltas.values():
            if delta.output_norm is not None or delta.output_scale is not None or delta.a.dim() == 3 or config.invocation:
                raise NotImplementedError("the format has two factors for each layer, and nothing else")
            if (delta.scale, len(delta.a)) != (first.scale, len(first.a)):
                raise NotImplementedError("the format has one rank and one scale")
        parameters = {"rank": config.rank, "scale": first.scale, "dropout": 0.1, "keys": ["self_attn.q_proj"]}
        stored = {"fine_tune_type": "lora", "lora_parameters": parameters, "model": config.base_model, "iters": 100, "train": True}
        return stored, {f"{layer}.lora_{side}": getattr(delta, side).t() for layer, delta in deltas.items() for side in "ab"}
