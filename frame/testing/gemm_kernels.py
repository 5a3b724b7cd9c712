"""The in-tree GEMM kernels of a device, as layers get them.

Used by the conformance suites and the tests of models. Must not name a kernel.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from frame.core.interfaces.gemm_kernel import GemmCapabilities, GemmChoice, GemmRequirements
from frame.plugins.loader import load_registry

if TYPE_CHECKING:
    from frame.core.interfaces.rank_context import RankContext
    from frame.plugins.registry import Registry


@functools.cache
def load_own_plugins() -> Registry:
    """The in-tree plugins, read once a process. The callers share the registry and must not change
    it."""
    return load_registry(installed=False)


def make_gemm_kernels(context: RankContext, named: str | None = None) -> tuple[GemmChoice, ...]:
    """The in-tree GEMM kernels that run on the context's device; `named` as if the user had named
    it."""
    registry = load_own_plugins()
    dtype = str(context.dtype).removeprefix("torch.")
    requirements = GemmRequirements(context.device.type, context.platform.compute_capability, dtype, deterministic=context.deterministic)
    choices = []
    for record in registry.records("gemm_kernel"):
        capabilities = record.capabilities
        is_usable = not record.problems or record.name == named  # others need a package that is not installed
        if is_usable and isinstance(capabilities, GemmCapabilities) and not capabilities.unsupported(requirements):
            choices.append(GemmChoice(record.name, registry.load(record)(context, None), capabilities.speeds, record.name == named))
    return tuple(choices)
