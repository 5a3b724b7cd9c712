"""FlashInfer's wrappers by layer shape: made once, planned once per step; for captured graphs, one
per batch size.

Depends on the library's calls and page lists, on no model or layer object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch

from frame.attention_backends.flashinfer.library import CUDA_CORE_GROUPS, KernelFamily, Library, Module, choose_family
from frame.attention_backends.flashinfer.page_lists import PageBuffers, PageLists
from frame.kernels import nvidia

WORKSPACE_BYTES = 8 << 20  # the library's default size of its plan buffer
NO_WINDOW = -1
MIN_RAGGED_QUERIES = 1024  # mean queries per extend from which gathering keys pays, for kernels that load contiguous keys by TMA
MAX_GATHERED_BYTES = 256 << 20  # larger keys and values are not gathered
# mean queries per extend up to which the FlashAttention-2 kernels are faster: one tile holds all
# heads of a key
MAX_SHORT_QUERIES = 80


class MHAShape(NamedTuple):
    """What a wrapper of multi-head attention depends on; layers of equal shape share one
    wrapper."""

    heads: int
    kv_heads: int
    width: int
    window: int  # visible keys before the query's own; -1: all
    soft_cap: float  # 0: none
    scale: float
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether decodes use the prefill kernels, which have tensor cores: each key is read for
        many heads."""
        return self.heads // self.kv_heads not in CUDA_CORE_GROUPS

    def list_modules(self, capability: tuple[int, int]) -> list[Module]:
        traits = (self.dtype, self.kv_dtype, self.width, self.width, self.window != NO_WINDOW, self.soft_cap > 0)
        form = choose_family(capability, *traits[:4])
        needed = [Module("prefill", "fa2", *traits)]
        if form != "fa2":
            needed.append(Module("prefill", form, *traits))
        if not self.uses_tensor_cores:
            needed.append(Module("decode", "fa2", *traits))
        return needed


class MLAShape(NamedTuple):
    """What a wrapper of latent attention depends on."""

    heads: int
    rank: int
    rope: int
    width: int  # nope + rope: width of expanded queries and keys
    value_width: int
    scale: float
    dtype: torch.dtype

    @property
    def expands_latents(self) -> bool:
        """Whether there are ragged kernels for the expanded form."""
        return (self.width, self.value_width) == (192, 128) or (self.width == self.value_width and self.width in (64, 128, 256))

    def list_modules(self, capability: tuple[int, int]) -> list[Module]:
        form: KernelFamily = "fa3" if capability[0] == 9 else "fa2"
        needed = [Module("latent", form, self.dtype, self.dtype, self.rank, self.rope)]
        if self.expands_latents:
            expanded = choose_family(capability, self.dtype, self.dtype, self.width, self.value_width)
            needed.append(Module("prefill", expanded, self.dtype, self.dtype, self.width, self.value_width))
        return needed


class Wrapper:
    """One library wrapper. Planning overwrites the host memory of the previous plan, so it waits
    until that plan's copy to the device has completed, which it has unless plans are made more than
    one step ahead."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper = wrapper
        self._copied = nvidia.create_event() if device.type == "cuda" else None

    @contextmanager
    def open_plan(self) -> Iterator[Any]:
        if self._copied is not None:
            self._copied.synchronize()
        yield self._wrapper
        if self._copied is not None:
            self._copied.record()

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = self._wrapper.run(*args, **kwargs)
        return out


class Wrappers:
    """Makes, caches and plans the wrappers of one rank. All share one workspace, because their
    kernels run one after another."""

    def __init__(self, library: Library | None, device: torch.device, capability: tuple[int, int], workspace_bytes: int) -> None:
        """`library` None: the installed library, imported on first use."""
        self._chosen_library = library
        self._device = device
        self._capability = capability
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        # device side, shared by the batch sizes of a role
        self._plans: dict[tuple[str, MHAShape | MLAShape], torch.Tensor] = {}
        self._wrappers: dict[tuple[str, MHAShape | MLAShape, int], Wrapper] = {}

    @cached_property
    def _library(self) -> Library:
        return self._chosen_library or Library.load()

    def compile(self, shapes: Iterable[MHAShape | MLAShape], on_compile: Callable[[str], None] | None = None) -> None:
        """Compile the missing modules of `shapes`."""
        modules = dict.fromkeys(module for shape in shapes for module in shape.list_modules(self._capability))
        self._library.compile(modules, on_compile)

    def plan_decode(self, shape: MHAShape, lists: PageLists, page_size: int) -> Wrapper:
        """A planned wrapper for the decodes of a step that is not captured."""
        wrapper = self._get("decode", shape, 0, lambda: self._decoder(shape))
        self._run_decode_plan(wrapper, shape, lists, page_size)
        return wrapper

    def plan_captured_decode(self, shape: MHAShape, lists: PageLists, page_size: int, buffers: PageBuffers) -> Wrapper:
        """A planned wrapper for captured decodes, with all device memory at fixed addresses; one
        wrapper per number of rows."""
        rows = lists.rows
        known = ("decode", shape, rows) in self._wrappers

        def make() -> Any:
            decoder = self._decoder(
                shape,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=buffers.page_starts[: rows + 1],
                paged_kv_indices_buffer=buffers.pages,
                paged_kv_last_page_len_buffer=buffers.last_page[:rows],
            )
            decoder.reset_workspace_buffer(self._workspace, self._plan_memory("decode", shape))
            return decoder

        wrapper = self._get("decode", shape, rows, make)
        if not known:
            self._run_decode_plan(wrapper, shape, lists, page_size)
            return wrapper
        with wrapper.open_plan() as inner:
            self._library.plan_captured(
                inner,
                lists.page_starts,
                lists.pages,
                lists.last_page,
                **self._decode_arguments(shape, page_size),
                global_override_indptr_cpu=lists.page_starts,
            )
        return wrapper

    def plan_extend(self, shape: MHAShape, lists: PageLists, page_size: int) -> Wrapper:
        """A planned wrapper for extends over pages."""
        form = choose_family(self._capability, shape.dtype, shape.kv_dtype, shape.width, shape.width)
        if int(lists.query_starts[-1]) <= MAX_SHORT_QUERIES * lists.rows:
            form = "fa2"
        wrapper = self._get(f"extend {form}", shape, 0, lambda: self._library.prefill(self._workspace, "NHD", backend=form))
        with wrapper.open_plan() as inner:
            inner.plan(
                lists.query_starts,
                lists.page_starts,
                lists.pages,
                lists.last_page,
                shape.heads,
                shape.kv_heads,
                shape.width,
                page_size,
                causal=True,
                sm_scale=shape.scale,
                window_left=shape.window,
                logits_soft_cap=shape.soft_cap,
                q_data_type=shape.dtype,
                kv_data_type=shape.kv_dtype,
            )
        return wrapper

    def plan_latent(self, shape: MLAShape, lists: PageLists, page_size: int, buffers: PageBuffers | None = None) -> Wrapper:
        """A planned wrapper for absorbed queries; with `buffers`, for captured decodes."""
        form = "fa3" if self._capability[0] == 9 else "fa2"
        rows = 0 if buffers is None else lists.rows

        def make() -> Any:
            if buffers is None:
                return self._library.latent(self._workspace, backend=form)
            return self._library.latent(
                self._workspace,
                use_cuda_graph=True,
                qo_indptr=buffers.query_starts[: rows + 1],
                kv_indptr=buffers.page_starts[: rows + 1],
                kv_indices=buffers.pages,
                kv_len_arr=buffers.lengths[:rows],
                backend=form,
            )

        wrapper = self._get("latent", shape, rows, make)
        with wrapper.open_plan() as inner:
            inner.plan(
                qo_indptr=lists.query_starts,
                kv_indptr=lists.page_starts,
                # the graph writes those of a captured step
                kv_indices=lists.pages if buffers is None else lists.pages[:0],
                kv_len_arr=lists.lengths,
                num_heads=shape.heads,
                head_dim_ckv=shape.rank,
                head_dim_kpe=shape.rope,
                page_size=page_size,
                causal=True,
                sm_scale=shape.scale,
                q_data_type=shape.dtype,
                kv_data_type=shape.dtype,
            )
        return wrapper

    def prefers_ragged(self, shape: MHAShape, lists: PageLists) -> bool:
        """Whether these extends are faster over gathered, contiguous keys and values than over
        pages, including the copy."""
        form = choose_family(self._capability, shape.dtype, shape.kv_dtype, shape.width, shape.width)
        plain = form == "fa3" and shape.dtype == shape.kv_dtype and shape.window == NO_WINDOW and not shape.soft_cap
        gathered = int(lists.lengths.sum()) * 2 * shape.kv_heads * shape.width * shape.dtype.itemsize
        return plain and int(lists.query_starts[-1]) >= MIN_RAGGED_QUERIES * lists.rows and gathered <= MAX_GATHERED_BYTES

    def plan_ragged(self, shape: MHAShape, query_starts: torch.Tensor, key_starts: torch.Tensor) -> Wrapper:
        """A planned wrapper for extends over contiguous keys and values. Both arrays are on the
        host, int32 [rows + 1]."""
        return self._ragged("ragged", shape, (shape.heads, shape.kv_heads, shape.width, shape.width), query_starts, key_starts)

    def plan_expanded(self, shape: MLAShape, query_starts: torch.Tensor, key_starts: torch.Tensor) -> Wrapper:
        """As `plan_ragged`, for keys and values expanded from latents."""
        sizes = shape.heads, shape.heads, shape.width, shape.value_width
        return self._ragged("expanded", shape, sizes, query_starts, key_starts)

    def _ragged(
        self,
        role: str,
        shape: MHAShape | MLAShape,
        sizes: tuple[int, int, int, int],  # query heads, key heads, widths of keys and of values
        query_starts: torch.Tensor,
        key_starts: torch.Tensor,
    ) -> Wrapper:
        heads, kv_heads, width, value_width = sizes
        form = choose_family(self._capability, shape.dtype, shape.dtype, width, value_width)
        wrapper = self._get(role, shape, 0, lambda: self._library.ragged(self._workspace, "NHD", backend=form))
        with wrapper.open_plan() as inner:
            inner.plan(
                query_starts,
                key_starts,
                heads,
                kv_heads,
                width,
                head_dim_vo=value_width,
                causal=True,
                sm_scale=shape.scale,
                q_data_type=shape.dtype,
                kv_data_type=shape.dtype,
                o_data_type=shape.dtype,
            )
        return wrapper

    def _decoder(self, shape: MHAShape, **graph: Any) -> Any:
        # the FlashAttention-3 kernels have no split-KV, so a few long rows would not fill the
        # device
        return self._library.decode(self._workspace, "NHD", use_tensor_cores=shape.uses_tensor_cores, backend="fa2", **graph)

    def _run_decode_plan(self, wrapper: Wrapper, shape: MHAShape, lists: PageLists, page_size: int) -> None:
        with wrapper.open_plan() as inner:
            inner.plan(lists.page_starts, lists.pages, lists.last_page, **self._decode_arguments(shape, page_size))

    @staticmethod
    def _decode_arguments(shape: MHAShape, page_size: int) -> dict[str, Any]:
        return {
            "num_qo_heads": shape.heads,
            "num_kv_heads": shape.kv_heads,
            "head_dim": shape.width,
            "page_size": page_size,
            "window_left": shape.window,
            "logits_soft_cap": shape.soft_cap,
            "sm_scale": shape.scale,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.kv_dtype,
        }

    def _get(self, role: str, shape: MHAShape | MLAShape, rows: int, make: Any) -> Wrapper:
        key = (role, shape, rows)
        if key not in self._wrappers:
            self._wrappers[key] = Wrapper(make(), self._device)
        return self._wrappers[key]

    def _plan_memory(self, role: str, shape: MHAShape | MLAShape) -> torch.Tensor:
        if (role, shape) not in self._plans:
            self._plans[role, shape] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        return self._plans[role, shape]
