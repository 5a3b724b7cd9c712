"""The conformance suite of GEMM kernels: every product equals that of the dequantized weight.

Weights are random, in every scheme of the types that the kernel has a speed for. Must
not name a kernel or a format.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from frame.core.interfaces.gemm_kernel import GemmCapabilities, GemmKernel, GemmRequirements, find_kernel_obstacle
from frame.core.interfaces.weight_format import CanonicalWeight, QuantType, WeightScheme
from frame.entrypoints.tools.bench.paged_batches import DTYPES, build_context
from frame.plugins.devices import open_platform
from frame.testing.conformance import Check, SkipCheck, Subject
from frame.testing.generators import call_at_one_address, require_bounded, require_kept, require_near_reference
from frame.testing.tensors import require_form, require_near
from frame.testing.torch_calls import unchanged_torch
from frame.testing.weights.canonical_weights import make_weight, repeat_inputs

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}  # relative to the largest value
SUM_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 1.2e-2}  # of sums over many inputs
QUANTIZED_INPUTS = 0.1  # where a kernel quantizes activations too
COUNTED = 0.02  # relative error of counted bytes
NARROW = 32  # inputs of a weight whose scales weigh as much as its values
INT8_ERROR = 1.3  # of quantized inputs, relative to that of rounding to int8 with a scale per row
ROWS = (1, 2, 7, 17, 70, 71, 513)
MANY_ROWS = (1025, 4097, 8193)
OUTPUTS, INPUTS = 128, 256
NUM_EXPERTS = 130
SCHEMES: tuple[tuple[WeightScheme, bool], ...] = (  # with a second scale per output or without
    (WeightScheme("plain"), False),
    (WeightScheme("int4", (1, 0)), False),
    (WeightScheme("int4", (1, 32)), False),
    (WeightScheme("int4", (1, 64), zeros=True), False),
    (WeightScheme("int4", (1, 32), minima=True), False),
    (WeightScheme("int4", (1, 128), zeros=True, ordered=True), False),
    (WeightScheme("int8", (1, 0)), False),
    (WeightScheme("int8", (1, 128), zeros=True), False),
    (WeightScheme("int8", (1, 64)), False),
    (WeightScheme("int8", (1, 64), ordered=True), False),
    (WeightScheme("e2m1", (1, 32)), False),
    (WeightScheme("e2m1", (1, 16)), True),
    (WeightScheme("nf4", (1, 64)), False),
    (WeightScheme("e4m3", (1, 0)), False),
    (WeightScheme("e4m3", (128, 128)), False),
)


def suite(subject: Subject) -> Iterator[Check]:
    """`gemm_kernel/2`, in every dtype of the capabilities."""
    quantized = _quantized(subject)
    for name in _dtypes(subject):
        for scheme, outer in SCHEMES:
            if scheme.quant_type in quantized:
                case = Case(subject, DTYPES[name], scheme, outer)
                label = f"{name}-{str(scheme).replace(' ', '_')}"
                yield Check(f"product_equals_the_reference-{label}", case.check_gemm)
                yield Check(f"experts_equal_the_reference-{label}", case.check_experts)
        first = next(((scheme, outer) for scheme, outer in SCHEMES if scheme.quant_type in quantized), None)
        if first is not None:
            case = Case(subject, DTYPES[name], *first)
            yield Check(f"bias_is_added-{name}", case.check_bias)
            yield Check(f"a_row_stands_alone-{name}", case.check_row_alone)
            yield Check(f"any_leading_dimensions-{name}", case.check_dimensions)
            yield Check(f"values_replaced_in_place-{name}", case.check_update)
            yield Check(f"values_of_experts_replaced_in_place-{name}", case.check_update_of_experts)
            yield Check(f"products_leave_nothing-{name}", case.check_memory)
            yield Check(f"process_is_left_as_it_is-{name}", partial(case.check_process, subject))
            yield Check(f"arguments_are_not_changed-{name}", case.check_arguments)
            yield Check(f"gated_product-{name}", case.check_gated)
            yield Check(f"results_are_kept-{name}", case.check_results)
            yield Check(f"long_sums-{name}", case.check_sums)
            yield Check(f"rows_of_any_magnitude-{name}", case.check_magnitudes)
            yield Check(f"takes_no_longer_than_dequantizing-{name}", case.check_time)
            cases = [Case(subject, DTYPES[name], scheme, outer) for scheme, outer in SCHEMES if scheme.quant_type in quantized]
            yield Check(f"a_weight_of_each_type_is_taken-{name}", partial(_check_types, cases))
            yield Check(f"columns_of_zeros_repeat_inputs-{name}", partial(_check_repeated_inputs, cases))
            for what, experts in (("many_rows", 0), ("many_rows_of_experts", 2)):
                yield Check(f"{what}-{name}", partial(_check_many_rows, cases, experts))
            yield Check(f"obstacles_are_those_of_the_weight-{name}", partial(_check_obstacles, cases))
            yield Check(f"quantized_inputs_keep_their_precision-{name}", partial(_check_quantized_inputs, cases))
            yield Check(f"bytes_are_as_counted-{name}", partial(_check_bytes, cases))
            if getattr(subject.record.capabilities, "batch_invariant", False):
                yield Check(f"batch_invariant-{name}", Case(subject, DTYPES[name], *first, deterministic=True).check_invariance)
    yield Check("other_sizes", partial(_check_sizes, subject))
    yield Check("real_sizes", partial(_check_real_sizes, subject))
    yield Check("scales_of_zero", partial(_check_zero_scales, subject))


def _quantized(subject: Subject) -> set[QuantType]:
    capabilities = subject.record.capabilities
    if not isinstance(capabilities, GemmCapabilities):
        return {"int8"}
    return {speed.quant_type for speed in capabilities.speeds}


def _dtypes(subject: Subject) -> list[str]:
    capabilities, device = subject.record.capabilities, subject.setting.device
    if not isinstance(capabilities, GemmCapabilities):
        return ["float32"]
    kind, capability = device.partition(":")[0], open_platform(device).compute_capability
    return [name for name in capabilities.dtypes if not capabilities.unsupported(GemmRequirements(kind, capability, name))]


class Case:
    """Products with random weights of one scheme."""

    def __init__(self, subject: Subject, dtype: torch.dtype, scheme: WeightScheme, outer: bool, deterministic: bool = False) -> None:
        self.device, self.dtype, self.scheme, self.outer = subject.setting.device, dtype, scheme, outer
        context = build_context(torch.device(self.device), dtype, 16, deterministic=deterministic)
        self.kernel: GemmKernel = subject.target(context, subject.options)
        self.tolerance = TOLERANCE[dtype]
        if dtype != torch.float32 and scheme.quant_type in ("e4m3", "int8"):
            self.tolerance = QUANTIZED_INPUTS if scheme.quant_type == "e4m3" else TOLERANCE[torch.bfloat16]

    def draw(self, outputs: int = OUTPUTS, inputs: int = INPUTS, experts: int = 0, seed: int = 0) -> CanonicalWeight:
        """A weight of the scheme on the device."""
        weight = make_weight(self.scheme, outputs, inputs, experts=experts, outer=self.outer, dtype=self.dtype, seed=seed)
        for name, tensor in weight.tensors.items():
            setattr(weight, name, tensor.to(self.device))
        return weight

    def make(self, outputs: int = OUTPUTS, inputs: int = INPUTS, experts: int = 0, seed: int = 0) -> CanonicalWeight:
        """A weight that the kernel takes."""
        weight = self.draw(outputs, inputs, experts, seed)
        obstacle = find_kernel_obstacle(self.kernel, weight)
        if obstacle is not None and self.scheme.quant_type == "int8":
            weight.quantizes_inputs = True
            obstacle = find_kernel_obstacle(self.kernel, weight)
        if obstacle is not None:
            raise SkipCheck(obstacle)
        return weight

    def input(self, rows: int, inputs: int = INPUTS) -> torch.Tensor:
        return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(self.device, self.dtype)

    def compare(self, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Assert that a result is close to float64 numbers."""
        require_form(got, expected, what, self.dtype)
        require_near(got, expected, what, self.tolerance)

    def reference(self, x: torch.Tensor, weight: CanonicalWeight) -> torch.Tensor:
        return x.double() @ weight.dequantize(torch.float32).double().t()

    def check_gemm(self) -> None:
        product, weight = self.kernel.prepare(self.make()), self.make()
        for rows in ROWS:
            x = self.input(rows)
            self.compare(product(x), self.reference(x, weight), f"{rows} rows")
        if self.outer:  # with the other seed, the second scale divides the first
            x, other = self.input(7), self.kernel.prepare(self.make(seed=1))
            self.compare(other(x), self.reference(x, self.make(seed=1)), f"a second scale with divides={self.make(seed=1).divides}")
        assert product(self.input(0)).shape == (0, OUTPUTS), "no rows: the result has another shape"

    def check_experts(self) -> None:
        weight = self.make(experts=3)
        product = self.kernel.prepare_experts(weight)
        weight = self.make(experts=3)
        for sizes in ((4, 0, 3), (0, 0, 1), (33, 20, 1), (2, 2, 0), (0, 0, 0)):
            x = self.input(sum(sizes))
            ends = torch.tensor(sizes).cumsum(0).to(self.device, torch.int32)
            parts = [self.reference(part, weight.expert(index)) for index, part in enumerate(x.split(sizes))]
            self.compare(product(x, ends), torch.cat(parts), f"experts with {sizes} rows")
        second, other = self.kernel.prepare_experts(self.make(experts=3, seed=2)), self.make(experts=3, seed=2)
        ends = torch.tensor([2, 3, 4]).to(self.device, torch.int32)
        x = self.input(9)
        parts = [self.reference(part, other.expert(index)) for index, part in enumerate(x[:4].split((2, 1, 1)))]
        self.compare(second(x, ends)[:4], torch.cat(parts), "experts of another layer")
        parts = [self.reference(part, weight.expert(index)) for index, part in enumerate(x[:4].split((2, 1, 1)))]
        whole = product(x, ends)
        require_form(whole, x.new_empty(len(x), OUTPUTS), "with rows after the last end", self.dtype)
        self.compare(whole[:4], torch.cat(parts), "with rows after the last end")
        wide = torch.zeros(len(x), INPUTS + 64, device=self.device, dtype=self.dtype)
        wide[:, :INPUTS] = x
        self.compare(product(wide[:, :INPUTS], ends)[:4], torch.cat(parts), "experts' rows that are not contiguous")

    def check_bias(self) -> None:
        product = self.kernel.prepare(self.make())
        bias = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(1)).to(self.device, self.dtype)
        for rows in (1, 70):
            x = self.input(rows)
            self.compare(product(x, bias), self.reference(x, self.make()) + bias.double(), f"{rows} rows with a bias")
        x = self.input(12)
        expected = self.reference(x, self.make()) + bias.double()
        for shape in ((12,), (1, 12), (3, 4), (4, 3, 1), (2, 2, 3)):
            got = product(x.view(*shape, INPUTS), bias)
            self.compare(got, expected.view(*shape, -1), f"rows of the dimensions {shape} with a bias")
        for shape in ((0,), (2, 0), (0, 3)):
            got = product(x.new_empty(*shape, INPUTS), bias)
            assert got.shape == (*shape, OUTPUTS), f"no rows, of the dimensions {shape}, with a bias: the result is {list(got.shape)}"

    def check_row_alone(self) -> None:
        product = self.kernel.prepare(self.make())
        x = self.input(9)
        expected = product(x).double()[:1]
        x[1:] = torch.nan
        result = product(x)
        self.compare(result[:1], expected, "row 0 while all others are NaN")
        assert not torch.isfinite(result[1:]).any(), "rows of NaN have finite results: the engine does not notice them"

    def check_invariance(self) -> None:
        """Rows have the bits that they have among any others, in any place."""
        for outputs, inputs in ((OUTPUTS, INPUTS), (64, 5 * INPUTS)):
            product, x = self.kernel.prepare(self.make(outputs, inputs)), self.input(300, inputs)
            whole = product(x)
            for first, rows in ((0, 1), (17, 1), (40, 2), (3, 7), (5, 33), (100, 130)):
                same = torch.equal(product(x[first : first + rows]), whole[first : first + rows])
                assert same, f"{rows} rows of {inputs} inputs have other bits than among 300 rows"

    def check_dimensions(self) -> None:
        product = self.kernel.prepare(self.make())
        x = self.input(6)
        expected = self.reference(x, self.make())
        self.compare(product(x.view(2, 3, INPUTS)), expected.view(2, 3, -1), "rows in two dimensions")
        wide = torch.zeros(6, INPUTS + 64, device=self.device, dtype=self.dtype)
        wide[:, :INPUTS] = x
        self.compare(product(wide[:, :INPUTS]), expected, "rows that are not contiguous")

    def check_update(self) -> None:
        """A captured graph reads the tensors of the product: new values written there count."""
        product, other = self.kernel.prepare(self.make()), self.kernel.prepare(self.make(seed=2))
        x, reference = self.input(3), self.make(seed=2)
        product(x)  # what a kernel prepares with its first product
        self._write(product.tensors, other.tensors)
        self.compare(product(x), self.reference(x, reference), "after an update in place")

    def check_update_of_experts(self) -> None:
        weights = [self.make(experts=2, seed=seed) for seed in (0, 2)]
        experts, others = (self.kernel.prepare_experts(weight) for weight in weights)
        x, ends, reference = self.input(4), torch.tensor([1, 4]).to(self.device, torch.int32), self.make(experts=2, seed=2)
        experts(x, ends)
        self._write(experts.tensors, others.tensors)
        parts = [self.reference(part, reference.expert(index)) for index, part in enumerate(x.split((1, 3)))]
        self.compare(experts(x, ends), torch.cat(parts), "experts after an update in place")

    def _write(self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
        """Write the tensors of a product to those of another one."""
        assert before, "the product lists no tensors"
        if any(tensor.is_mkldnn for tensor in before):
            raise SkipCheck("its tensors are opaque; they are replaced, not written")
        for old, new in zip(before, after, strict=True):
            assert (old.shape, old.dtype) == (new.shape, new.dtype), "the tensors of equal weights differ in form"
            old.copy_(new)

    def check_memory(self) -> None:
        """Products keep no input and no result."""
        product, experts = self.kernel.prepare(self.make()), self.kernel.prepare_experts(self.make(experts=2))
        x, ends = self.input(4), torch.tensor([1, 4]).to(self.device, torch.int32)
        require_bounded((self.kernel, product, experts), lambda number: (product(x), experts(x, ends)), 40, "products of one size", slack=5)

    def check_process(self, subject: Subject) -> None:
        with unchanged_torch("the kernel changes"):
            case = Case(subject, self.dtype, self.scheme, self.outer)
            case.kernel.prepare(case.make())(case.input(3))

    def check_results(self) -> None:
        """Inputs at one address have each their result, which the next one does not change, and
        weights of one form are apart."""
        weights = [self.make(seed=seed) for seed in (0, 2)]
        products = [self.kernel.prepare(self.make(seed=seed)) for seed in (0, 2)]
        x = self.input(7)
        inputs = [x, x.flip(0) * 0.5, -x]
        for product, weight in zip(products, weights, strict=True):
            for one, result in zip(inputs, call_at_one_address(product, inputs), strict=True):
                self.compare(result, self.reference(one, weight), "an input at the address of another one")
            require_kept(product, inputs[0], inputs[1], "the product")
        self.compare(products[0](x), self.reference(x, weights[0]), "a weight after another one of its form")

    def check_time(self) -> None:
        """A product takes at most as long as one that dequantizes its weight each time."""
        weight, product, x = self.make(), self.kernel.prepare(self.make()), self.input(2)
        require_near_reference(lambda: product(x), lambda: x @ weight.dequantize(self.dtype).t(), "a product of two rows", 4, 1.2e-3)

    def check_sums(self) -> None:
        """The sum over 16,384 inputs is not rounded to the inputs' type on its way."""
        inputs = 16_384
        weight, other = self.make(64, inputs), self.make(64, inputs)
        x = self.input(3, inputs)
        tolerance = min(self.tolerance, SUM_TOLERANCE[self.dtype]) if self.tolerance == TOLERANCE[self.dtype] else self.tolerance
        require_near(self.kernel.prepare(weight)(x), self.reference(x, other), f"a sum over {inputs} inputs", tolerance)

    def check_magnitudes(self) -> None:
        """Rows of zeros, which pad a batch, of large and of small numbers beside each other."""
        product, x, weight = self.kernel.prepare(self.make()), self.input(6), self.make()
        x[0] = 0
        if self.dtype != torch.float16:  # whose range ends there
            x[1], x[2] = x[1] * 2.0**20, x[2] * 2.0**-20
        result, expected = product(x), self.reference(x, weight)
        for row, what in enumerate(("zeros", "large numbers", "small numbers", "numbers beside them")):
            self.compare(result[row : row + 1], expected[row : row + 1], f"a row of {what}")

    def check_arguments(self) -> None:
        product, x = self.kernel.prepare(self.make()), self.input(5)
        kept = x.clone()
        first = product(x)
        assert torch.equal(x, kept), "the product changes its input"
        self.compare(product(x), first.double(), "a second time")

    def check_gated(self) -> None:
        product = self.kernel.prepare(self.make())
        gated = getattr(product, "multiply_gated", None)
        out = None if gated is None else gated(self.input(3))
        if out is None:
            raise SkipCheck("it has no gated product for these rows")
        gate, up = self.reference(self.input(3), self.make()).chunk(2, -1)
        self.compare(out, torch.nn.functional.silu(gate) * up, "gated")
        bias = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(1)).to(self.device, self.dtype)
        if gated is not None and (out := gated(self.input(3), bias)) is not None:
            gate, up = (self.reference(self.input(3), self.make()) + bias.double()).chunk(2, -1)
            self.compare(out, torch.nn.functional.silu(gate) * up, "gated with a bias")


def _check_types(cases: Sequence[Case]) -> None:
    """Of each type that it has a speed for, the kernel multiplies a layer's or experts' weight."""
    obstacles: dict[str, dict[str, str]] = {}
    taken = set()
    for case in cases:
        for outputs, inputs, experts in ((OUTPUTS, INPUTS, 0), (4096, 4096, 0), (OUTPUTS, INPUTS, 3)):
            if case.scheme.quant_type not in taken:
                try:
                    case.make(outputs, inputs, experts)
                    taken.add(case.scheme.quant_type)
                except SkipCheck as obstacle:
                    obstacles.setdefault(case.scheme.quant_type, {})[str(obstacle)] = f"{case.scheme}, {outputs} x {inputs}"
    for quant_type in obstacles.keys() - taken:
        reasons = "; ".join(f"{what}: {reason}" for reason, what in obstacles[quant_type].items())
        raise AssertionError(f"its speeds name {quant_type}, and it takes no such weight ({reasons})")


def _check_many_rows(cases: Sequence[Case], experts: int) -> None:
    """Every row of a long prefill has its product, and the bias."""
    case = next((case for case in cases if find_kernel_obstacle(case.kernel, case.draw(experts=experts)) is None), cases[0])
    weight, other, bias = case.make(experts=experts), case.make(experts=experts), case.input(1, OUTPUTS)[0]
    product: Any = case.kernel.prepare_experts(weight) if experts else case.kernel.prepare(weight)
    for rows in MANY_ROWS:
        x, what = case.input(rows), f"{case.scheme}, {rows} rows"
        if experts:
            parts = [case.reference(part, other.expert(index)) for index, part in enumerate(x.split((rows - 3, 3)))]
            ends = torch.tensor([rows - 3, rows]).to(case.device, torch.int32)
            case.compare(product(x, ends), torch.cat(parts), f"{what} of two experts")
        else:
            case.compare(product(x, bias), case.reference(x, other) + bias.double(), f"{what} with a bias")


def _check_repeated_inputs(cases: Sequence[Case]) -> None:
    """In act-order, a column of zeros may repeat an input, before and after its other column."""
    num_checked = 0
    for case in (case for case in cases if case.scheme.ordered):
        for experts in (0, 2):
            drawn = case.draw(experts=experts)
            weight, other = repeat_inputs(drawn), repeat_inputs(drawn)
            if find_kernel_obstacle(case.kernel, weight) is not None:
                continue
            num_checked += 1
            x, what = case.input(7), f"{case.scheme}, {experts or 'no'} experts, columns of zeros that repeat inputs"
            if experts:
                ends = torch.tensor([3, 7]).to(case.device, torch.int32)
                parts = [case.reference(part, other.expert(index)) for index, part in enumerate(x.split((3, 4)))]
                case.compare(case.kernel.prepare_experts(weight)(x, ends), torch.cat(parts), what)
            else:
                case.compare(case.kernel.prepare(weight)(x), case.reference(x, other), what)
    if not num_checked:
        raise SkipCheck("it takes no such weight in act-order")


def _check_obstacles(cases: Sequence[Case]) -> None:
    """A kernel that was asked about other weights answers as one that was not."""
    shared = cases[0].kernel
    for case in [*cases, *reversed(cases)]:
        weight = case.draw()
        expected, obstacle = find_kernel_obstacle(case.kernel, weight), find_kernel_obstacle(shared, weight)
        assert obstacle is None or (isinstance(obstacle, str) and obstacle.strip()), f"{case.scheme}: the obstacle is {obstacle!r}"
        assert obstacle == expected, f"{case.scheme}: after other weights the obstacle is {obstacle!r}, and {expected!r} before"


def _check_quantized_inputs(cases: Sequence[Case]) -> None:
    """A kernel that quantizes the inputs of a checkpoint made for that has at most the error of
    int8 with one scale per row."""
    num_checked = 0
    for case in cases:
        weight = case.draw()
        weight.quantizes_inputs = True
        if find_kernel_obstacle(case.kernel, weight) is not None:
            continue
        num_checked += 1
        expected = weight.dequantize(torch.float32).double()
        for rows in (3, 70):
            x = case.input(rows)
            exact, step = x.double() @ expected.t(), x.double().abs().amax(1, keepdim=True) / 127
            rounding = float(((x.double() / step).round() * step @ expected.t() - exact).norm())
            allowed = INT8_ERROR * math.hypot(rounding, torch.finfo(case.dtype).eps / 2 * float(exact.norm()))
            error = float((case.kernel.prepare(replace(weight))(x).double() - exact).norm())
            what = f"{case.scheme}, {rows} rows of inputs that may be quantized to int8"
            assert error <= allowed, f"{what}: the error's norm is {error:.2e}; that of int8 with one scale per row allows {allowed:.2e}"
    if not num_checked:
        raise SkipCheck("it takes no weight whose inputs may be quantized")


def _check_bytes(cases: Sequence[Case]) -> None:
    """The memory plan counts what products keep, by weights on the meta device."""
    num_checked = 0
    for case in cases:
        for experts, inputs in ((0, 4 * INPUTS), (2, 4 * INPUTS), (0, NARROW)):
            try:
                weight = case.make(OUTPUTS, inputs, experts)
            except SkipCheck:
                continue
            meta: dict[str, Any] = {name: tensor.to("meta") for name, tensor in weight.tensors.items()}
            planned = replace(weight, **meta)
            assert find_kernel_obstacle(case.kernel, planned) is None, f"{case.scheme}: it refuses the weight on the meta device"
            counted = case.kernel.count_bytes(planned)
            gemm = case.kernel.prepare_experts(weight) if experts else case.kernel.prepare(weight)
            kept = sum(tensor.numel() * tensor.element_size() for tensor in {id(each): each for each in gemm.tensors}.values())
            what = f"{case.scheme}, {experts or 'no'} experts: count_bytes says {counted}, the GEMM keeps {kept}"
            assert abs(counted - kept) <= COUNTED * kept, what
            num_checked += 1
    if not num_checked:
        raise SkipCheck("the kernel takes no such sizes")


def _list_cases(subject: Subject) -> Iterator[Case]:
    """One scheme of each type, in the first dtype; with the thorough setting, all schemes."""
    seen: set[str] = set()
    for name in _dtypes(subject)[:1]:
        for scheme, outer in SCHEMES:
            if scheme.quant_type in _quantized(subject) and (subject.setting.thorough or scheme.quant_type not in seen):
                seen.add(scheme.quant_type)
                yield Case(subject, DTYPES[name], scheme, outer)


def _check_real_sizes(subject: Subject) -> None:
    """9,001 rows, 16,384 inputs, 16,384 outputs, 130 experts; of most results only parts are
    compared."""
    num_checked = 0
    for case in _list_cases(subject):
        for rows, outputs, inputs in ((9001, 64, 128), (3, 64, 16_384), (3, 16_384, 128)):
            try:
                weight, other = case.make(outputs, inputs), case.make(outputs, inputs)
            except SkipCheck:
                continue
            num_checked += 1
            x = case.input(rows, inputs)
            result, some = case.kernel.prepare(weight)(x), sorted({0, min(4096, rows - 1), rows - 1})
            case.compare(result[some], case.reference(x[some], other), f"{case.scheme}, {rows} x {inputs} by {outputs} outputs")
        try:
            weight, other = case.make(64, 128, experts=NUM_EXPERTS), case.make(64, 128, experts=NUM_EXPERTS)
        except SkipCheck:
            continue
        x, ends = case.input(NUM_EXPERTS, 128), torch.arange(1, NUM_EXPERTS + 1, dtype=torch.int32, device=case.device)
        result = case.kernel.prepare_experts(weight)(x, ends)
        for expert in (0, 63, 64, 127, 128, NUM_EXPERTS - 1):
            one = slice(expert, expert + 1)
            case.compare(result[one], case.reference(x[one], other.expert(expert)), f"{case.scheme}, expert {expert} of {NUM_EXPERTS}")
    if not num_checked:
        raise SkipCheck("the kernel takes no such sizes")


def _check_zero_scales(subject: Subject) -> None:
    """Groups whose weights are all 0 have a scale of 0."""
    num_checked = 0
    for case in _list_cases(subject):
        weight, other = case.make(), case.make()
        if weight.scales is None:
            continue
        num_checked += 1
        for each in (weight, other):
            assert each.scales is not None
            each.scales[: max(1, len(each.scales) // 2)] = 0
        x = case.input(5)
        case.compare(case.kernel.prepare(weight)(x), case.reference(x, other), f"{case.scheme}, scales of 0")
    if not num_checked:
        raise SkipCheck("its weights have no scales")


def _check_sizes(subject: Subject) -> None:
    """Sizes that no tile divides, and a last group of half as many inputs."""
    num_checked = 0
    for name in _dtypes(subject)[:1]:
        for scheme, outer in SCHEMES:
            if scheme.quant_type not in _quantized(subject):
                continue
            case = Case(subject, DTYPES[name], scheme, outer)
            group = scheme.group[1] or 32
            for outputs, inputs in ((48, group * 3), (200, group * 5), (64, group * 2 + group // 2)):
                try:
                    weight = case.make(outputs, inputs)
                except SkipCheck:
                    continue
                num_checked += 1
                gemm, x = case.kernel.prepare(weight), case.input(19, inputs)
                case.compare(gemm(x), case.reference(x, case.make(outputs, inputs)), f"{scheme}, {outputs} x {inputs}")
    if not num_checked:
        raise SkipCheck("the kernel takes no such sizes")
