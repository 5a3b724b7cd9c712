"""For training loops: `WeightClient`, which replaces the weights of a running server or engine."""

from frame.rl.weight_client import WeightClient, WeightUpdateError

__all__ = ["WeightClient", "WeightUpdateError"]
