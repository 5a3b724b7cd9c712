"""`SyntheticAcceptance`: accepts drafted tokens at random, for benchmarks of models with random
weights (vLLM: `synthetic_acceptance_length`; SGLang: `SGLANG_SIMULATE_ACC_LEN`).

Its `choose` is `SamplingPlanner.choose_accepted`. The output is not what the model draws. Imports
no torch.
"""

from __future__ import annotations

import numpy as np

from frame.core.sampling.sampling_metadata import draw_keys


class SyntheticAcceptance:
    """Every drafted token is accepted with the same probability, if those before it are. The
    probability is that with which drafts of `num_steps` tokens yield `mean_length` tokens a step,
    the drawn one included, in the mean."""

    def __init__(self, mean_length: float, num_steps: int) -> None:
        low, high = 0.0, 1.0
        for _ in range(60):  # bisection; the mean length grows with the rate
            self.rate = (low + high) / 2
            if 1 + sum(self.rate**place for place in range(1, num_steps + 1)) < mean_length:
                low = self.rate
            else:
                high = self.rate

    def choose(self, slots: np.ndarray, positions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Which samples are replaced by their drafted token: int64 [samples], 1 or 0. It depends on
        slot and position alone, so that all ranks choose alike. targets: -1 where there is none."""
        uniform = (draw_keys(slots, positions).view(np.uint64) >> np.uint64(11)) * 2.0**-53
        return ((uniform < self.rate) & (targets >= 0)).astype(np.int64)
