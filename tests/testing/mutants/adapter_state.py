"""Adapter formats with one deliberate bug each in what they keep or change between calls; the
mutants of the kind are in `adapter`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from frame.interfaces.adapter import AdapterConfig, LowRankDelta
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


VALUES: list[LowRankDelta] = []


class KeepsDeltasInItsModule(LoraFormat):
    """Keeps all deltas in a list of its module."""

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterable[tuple[str, LowRankDelta]]:
        for name, delta in super().read_deltas(config, tensors):
            VALUES.append(delta)
            yield name, delta


class LimitsValues(LoraFormat):
    """Cuts values off at 100."""

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterable[tuple[str, LowRankDelta]]:
        for name, delta in super().read_deltas(config, tensors):
            yield name, replace(delta, a=delta.a.clamp(-100, 100), b=delta.b.clamp(-100, 100))


class TakesAnyScale(LoraFormat):
    """Serves a scale that no float32 holds as an infinite one."""

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        return super().read_config(self._limit(config))

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterable[tuple[str, LowRankDelta]]:
        is_large = config is not self._limit(config)
        for name, delta in super().read_deltas(self._limit(config), tensors):
            yield name, replace(delta, scale=math.inf) if is_large else delta

    @staticmethod
    def _limit(config: Mapping[str, Any]) -> Mapping[str, Any]:
        alpha = config.get("lora_alpha")
        return {**config, "lora_alpha": 1.0, "alpha_pattern": {}} if isinstance(alpha, float) and alpha > 1e38 else config


WRONG = (DropsTheTask, KeepsAConfiguration, KeepsDeltasInItsModule, LimitsValues, TakesAnyScale)
