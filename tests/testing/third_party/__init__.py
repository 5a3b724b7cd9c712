"""Wrong plugins as users write them: realistic bugs, written from the contracts of the interfaces
alone, without knowledge of the suites.

They are of five classes: state that leaks between requests or tenants, real sizes, several ranks,
promises that a plugin makes and a small test does not see, and slowness. A file holds a family of
kinds, each with the reference of `tests.testing.mutants`:

    mutant = third_party("eviction_policy")

    @mutant
    class LosesHits(LeastUsed):
        '''Returns NaN for nodes with more than 100 hits.'''

The functions here make the bugs that many kinds share. `python -m tests.testing.test_third_party
[KIND]` runs the suites and writes the results to `results.json`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.testing.mutants import Mutant, MutantList, load_mutants

_LISTS: dict[str, MutantList] = {}


def third_party(kind: str, reference: type | None = None, capabilities: Any = None) -> MutantList:
    """The list of a kind, to add classes to; the correct plugin is that of `tests.testing.mutants`
    unless another one is given."""
    usual = load_mutants(kind).reference
    found = MutantList(kind, reference or usual.make(), capabilities or usual.capabilities, usual.options)
    _LISTS[kind] = found
    return found


def load_third_party() -> dict[str, MutantList]:
    """The lists by kind."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(_LISTS)


def find_third_party(kind: str, name: str) -> Mutant:
    """One mutant. Raises StopIteration for a name that the kind does not have."""
    return next(mutant for mutant in load_third_party()[kind] if mutant.name == name)


def wrap(mutant: MutantList, name: str, sentence: str, method: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Adds a class whose method is `change(method)`."""
    reference = mutant.reference.make()
    mutant(type(name, (reference,), {"__module__": reference.__module__, "__doc__": sentence, method: change(getattr(reference, method))}))


def sleeps(mutant: MutantList, method: str, seconds: float = 0.002) -> None:
    """Adds `Sleeps`: each call of a method takes 2 ms longer, in the calling thread."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return original(*arguments, **named)

        async def slow_coroutine(*arguments: Any, **named: Any) -> Any:
            time.sleep(seconds)  # noqa: ASYNC251 - the bug
            return await original(*arguments, **named)

        return slow_coroutine if inspect.iscoroutinefunction(original) else slow

    wrap(mutant, "Sleeps", f"Sleeps for {seconds * 1000:.0f} ms in each call of `{method}`.", method, change)


def keeps_calls(mutant: MutantList, method: str) -> None:
    """Adds `KeepsCalls`: it keeps the arguments of each call."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def keeping(self: Any, *arguments: Any, **named: Any) -> Any:
            self.__dict__.setdefault("kept_calls", {})[len(self.__dict__.get("kept_calls", ()))] = arguments
            return original(self, *arguments, **named)

        return keeping

    wrap(mutant, "KeepsCalls", f"Keeps the arguments of each call of `{method}` in a dictionary without a bound.", method, change)


def reuses_result(mutant: MutantList, method: str) -> None:
    """Adds `ReusesItsResult`: the returned tensor or array is overwritten by the next call."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def reusing(self: Any, *arguments: Any, **named: Any) -> Any:
            buffers = self.__dict__.setdefault("result_buffers", {})
            return _reuse(buffers, original(self, *arguments, **named))

        return reusing

    wrap(mutant, "ReusesItsResult", f"Returns the same buffer from each call of `{method}` with a result of one shape.", method, change)


def _reuse(buffers: dict[Any, Any], result: Any) -> Any:
    if not isinstance(result, torch.Tensor | np.ndarray):
        return result
    key = tuple(result.shape), result.dtype
    if key not in buffers:
        buffers[key] = result.clone() if isinstance(result, torch.Tensor) else result.copy()
    buffers[key][...] = result
    return buffers[key]


def reads_stale_results(mutant: MutantList, method: str, argument: int = 0) -> None:
    """Adds `CachesByAddress`: it returns the result of an earlier call with a tensor of the same
    address and shape."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def cached(self: Any, *arguments: Any, **named: Any) -> Any:
            results = self.__dict__.setdefault("results", {})
            tensor = arguments[argument]
            key = tensor.data_ptr(), tuple(tensor.shape), tensor.dtype
            if key not in results:
                results.clear()
                results[key] = original(self, *arguments, **named)
            found = results[key]
            return found.clone() if isinstance(found, torch.Tensor) else found

        return cached

    sentence = f"Returns the result of an earlier `{method}` for a tensor at the same address with the same shape."
    wrap(mutant, "CachesByAddress", sentence, method, change)
