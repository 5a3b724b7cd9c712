"""What every quantization method must satisfy, without knowing its format.

Parameters are filled with random numbers of their type; the weights that they stand for are read
off by multiplying the identity. Knows no checkpoint format: that stored weights are read rightly is
the method's own test.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from frame.core.interfaces.quantization import (
    LinearMethod,
    QuantizationCapabilities,
    QuantizationContext,
    QuantizationMethod,
    QuantizationRequirements,
)
from frame.testing.conformance import Check, Subject
from frame.testing.devices import open_platform

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}  # relative to the largest value
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
INPUT, OUTPUTS = 256, (256, 128, 128)  # sizes that block scales of 128 divide
ROWS = (1, 2, 7, 64, 300)


def suite(subject: Subject) -> Iterator[Check]:
    """`quantization/2`, in every dtype of the capabilities."""
    for name in _dtypes(subject):
        dtype = DTYPES[name]
        yield Check(f"create_registers_parameters-{name}", partial(_registers, subject, dtype))
        yield Check(f"apply_is_one_matrix_whatever_the_batch-{name}", partial(_one_matrix, subject, dtype))
        yield Check(f"merged_parts_are_apart-{name}", partial(_parts, subject, dtype))
        yield Check(f"bias_is_added-{name}", partial(_bias, subject, dtype))
        yield Check(f"a_row_stands_alone-{name}", partial(_alone, subject, dtype))
        yield Check(f"finish_again_after_an_update-{name}", partial(_finish_again, subject, dtype))
        yield Check(f"experts_are_created_and_finished-{name}", partial(_experts, subject, dtype))


def _dtypes(subject: Subject) -> list[str]:
    capabilities, device = subject.record.capabilities, subject.setting.device
    if not isinstance(capabilities, QuantizationCapabilities):
        return list(DTYPES)
    capability = open_platform(device).compute_capability
    checkpoint = capabilities.checkpoints[0]
    requirements = {name: QuantizationRequirements(device.partition(":")[0], capability, checkpoint, name) for name in capabilities.dtypes}
    return [name for name, need in requirements.items() if not capabilities.unsupported(need)]


def _method(subject: Subject) -> QuantizationMethod:
    given = getattr(subject.target, "conformance_config", None)  # a checkpoint's `quantization_config`, where a method needs one
    method: QuantizationMethod = subject.target(QuantizationContext(given), subject.options)
    return method


def _linear(subject: Subject, dtype: torch.dtype) -> tuple[LinearMethod, nn.Module]:
    """A layer, created and filled, not yet finished."""
    method = _method(subject).linear("model.layers.0.mlp.up_proj", "linear")
    layer = nn.Module()
    with torch.device(subject.setting.device):
        method.create_weights(layer, INPUT, OUTPUTS, dtype)
    fill(layer, seed=0)
    return method, layer


def fill(layer: nn.Module, seed: int) -> None:
    """Random numbers for every parameter: weights around zero, scales small and positive, integers
    over their whole range."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in layer.named_parameters():
        shape, kind = parameter.shape, parameter.dtype
        if not kind.is_floating_point:
            limits = torch.iinfo(kind)
            values = torch.randint(limits.min, limits.max, shape, generator=generator, dtype=torch.int64).to(kind)
        elif "scale" in name or kind == torch.float8_e8m0fnu:
            values = (torch.rand(shape, generator=generator) * 0.01 + 0.01).to(kind)
        else:
            values = (torch.randn(shape, generator=generator) * (0.05 if kind.itemsize > 1 else 1.0)).to(kind)
        parameter.data.copy_(values)


def _registers(subject: Subject, dtype: torch.dtype) -> None:
    _, layer = _linear(subject, dtype)
    named = dict(layer.named_parameters())
    assert named, "create registered no parameter"
    assert all(not parameter.requires_grad for parameter in named.values()), "a parameter requires a gradient"


def _matrix(method: LinearMethod, layer: nn.Module, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The weights that the layer stands for, float64 [inputs, outputs]."""
    return method.apply(layer, torch.eye(INPUT, dtype=dtype, device=device)).double().cpu()


def _input(rows: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(rows, INPUT, generator=torch.Generator().manual_seed(rows)).to(dtype=dtype, device=device)


def _close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    assert torch.isfinite(got).all(), f"{what}: the result is not finite"
    error = float((got.double().cpu() - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
    assert error <= TOLERANCE[dtype], f"{what}: largest relative error {error:.2e}, allowed {TOLERANCE[dtype]:.0e}"


def _one_matrix(subject: Subject, dtype: torch.dtype) -> None:
    device = subject.setting.device
    method, layer = _linear(subject, dtype)
    method.process_weights(layer)
    matrix = _matrix(method, layer, dtype, device)
    assert tuple(matrix.shape) == (INPUT, sum(OUTPUTS)), f"apply yields {matrix.shape[-1]} outputs, not {sum(OUTPUTS)}"
    assert float(matrix.abs().max()) > 0, "all weights are zero"
    for rows in ROWS:
        x = _input(rows, dtype, device)
        out = method.apply(layer, x)
        assert out.dtype == dtype, f"apply yields {out.dtype}, not {dtype}"
        _close(out, x.double().cpu() @ matrix, dtype, f"{rows} rows")
    x = _input(6, dtype, device).view(2, 3, INPUT)
    _close(method.apply(layer, x), x.double().cpu() @ matrix, dtype, "rows in two dimensions")


def _parts(subject: Subject, dtype: torch.dtype) -> None:
    method, layer = _linear(subject, dtype)
    method.process_weights(layer)
    whole = _matrix(method, layer, dtype, subject.setting.device)
    assert torch.linalg.matrix_rank(whole) > INPUT // 2, "the merged parts repeat each other"


def _bias(subject: Subject, dtype: torch.dtype) -> None:
    device = subject.setting.device
    method, layer = _linear(subject, dtype)
    method.process_weights(layer)
    bias = torch.randn(sum(OUTPUTS), generator=torch.Generator().manual_seed(1)).to(dtype=dtype, device=device)
    x = _input(5, dtype, device)
    _close(method.apply(layer, x, bias), method.apply(layer, x).double().cpu() + bias.double().cpu(), dtype, "with a bias")


def _alone(subject: Subject, dtype: torch.dtype) -> None:
    device = subject.setting.device
    method, layer = _linear(subject, dtype)
    method.process_weights(layer)
    x = _input(9, dtype, device)
    expected = method.apply(layer, x).double().cpu()[:1]
    x[1:] = torch.nan
    _close(method.apply(layer, x)[:1], expected, dtype, "row 0 while all others are NaN")


def _finish_again(subject: Subject, dtype: torch.dtype) -> None:
    """Load, finish, load other weights, finish: as if the other weights had been the first."""
    device = subject.setting.device
    method, layer = _linear(subject, dtype)
    before = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    method.process_weights(layer)
    first = _matrix(method, layer, dtype, device)
    method.process_weights(layer)
    _close(_matrix(method, layer, dtype, device), first, dtype, "after a second finish")
    if {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()} != before:
        return  # repacked into other parameters: what an update loads is not known here
    fill(layer, seed=1)
    method.process_weights(layer)
    other, fresh = _linear(subject, dtype)
    fill(fresh, seed=1)
    other.process_weights(fresh)
    _close(_matrix(method, layer, dtype, device), _matrix(other, fresh, dtype, device), dtype, "after an update")


def _experts(subject: Subject, dtype: torch.dtype) -> None:
    method = _method(subject).experts("model.layers.0.mlp.experts")
    layer = nn.Module()
    with torch.device(subject.setting.device):
        method.create_weights(layer, 4, 256, 128, dtype)
    names = [name for name, _ in layer.named_parameters()]
    for part in ("gate_up", "down"):
        assert any(name.startswith(part) for name in names), f"create registered no parameter whose name begins with {part}"
    fill(layer, seed=0)
    method.process_weights(layer)
    method.process_weights(layer)
