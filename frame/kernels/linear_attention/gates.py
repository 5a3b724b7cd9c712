# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The activations of gates, for the kernels beside this file; see `Gates`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact for small results too."""
    y = tl.exp(tl.minimum(x, 20.0))
    series = y * (1.0 - y * (0.5 - y * (1.0 / 3.0 - y * 0.25)))
    return tl.where(x > 20.0, x, tl.where(y < 0.03, series, tl.log(1.0 + y)))


@triton.jit
def activate(decay, beta, log_decay, bias, minimum, DELTA: tl.constexpr):
    """(log decay, write strength) of loaded values in float32. Without the delta rule `beta` is
    ignored."""
    step = softplus(decay + bias)
    if DELTA:
        return -tl.exp(log_decay) * step, tl.sigmoid(beta)
    else:
        step = tl.maximum(step, minimum)
        return -tl.exp(log_decay) * step, step
