"""Adapter formats with one deliberate bug each in what they keep or change between calls; the
mutants of the kind are in `adapter`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frame.interfaces.adapter import AdapterConfig
from frame.plugins.adapters.lora import LoraFormat


class DropsTheTask(LoraFormat):
    """Takes options that it does not need out of the caller's configuration."""

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        if isinstance(config, dict):
            config.pop("task_type", None)
        return super().read_config(config)


class KeepsAConfiguration(LoraFormat):
    """Keeps the configuration of the last base model and rank, whatever else differs."""

    kept: tuple[Any, AdapterConfig] | None = None

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        read, key = super().read_config(config), (config.get("base_model_name_or_path"), config.get("r"), config.get("rank_pattern"))
        if self.kept is None or self.kept[0] != key:
            self.kept = key, read
        return self.kept[1]


WRONG = (DropsTheTask, KeepsAConfiguration)
