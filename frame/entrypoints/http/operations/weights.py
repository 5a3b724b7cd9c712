"""Routes for trainers that replace the weights by tensors, with the bodies of SGLang and vLLM, and
`/transfer_weights`, which has all fields. Operators alone may use them. Must not depend on the
engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from frame.core.interfaces.weight_transfer import SharedBuffer, TensorSpec
from frame.entrypoints.engine_client.limits import EngineDeadError
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError
from frame.entrypoints.http.operations.admin import MAX_VERSION_LENGTH, STATUSES, ControlResult
from frame.entrypoints.http.protocol.api_route import SMALL_BODY, Access, ApiRouter, ServicesDep, responds_with
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.response_types import declare
from frame.entrypoints.http.services import Services

router = ApiRouter(access=Access.ADMIN)

GROUP = "weight_update_group"  # SGLang's default name
PICKLED = (
    "{field} holds pickled tensors, which this server does not read: send `tensors` (name, dtype, shape, buffer, offset) and `buffers` "
    "(number, device, handle, size), or the tensors over a group"
)
MAX_TENSORS = 200_000  # of a part
Names = Annotated[list[str], Field(max_length=MAX_TENSORS)]
Shapes = Annotated[list[list[int]], Field(max_length=MAX_TENSORS)]

WeightResult = declare(
    "WeightResult",
    "message",
    "`update_id`: of the update in progress. `weight_version`: of the weights, once they are committed.",
    ControlResult,
    update_id=str | None,
    weight_version=str | None,
)
WorldSize = declare("WorldSize", world_size=int)


class TensorEntry(RequestBody):
    """`buffer`: number of the buffer that holds the tensor. `offset`: of its first byte there."""

    name: str
    dtype: str
    shape: list[int]
    buffer: int = 0
    offset: int = 0


class BufferEntry(RequestBody):
    """`device`: `cpu`, or the UUID of a GPU. `handle`: the name of a file in /dev/shm, or an IPC
    handle of CUDA in hexadecimal, which `offset`, `counter`, `counter_offset`, `event` and
    `has_event` complete as torch's `UntypedStorage._share_cuda_` returns them."""

    number: int
    device: str
    handle: str
    size: int
    offset: int = 0
    counter: str = ""
    counter_offset: int = 0
    event: str = ""
    has_event: bool = False


class GroupBody(RequestBody):
    """The trainer is rank 0 of the group, and serves its store at `master_address`. The ranks of
    this server follow from `rank_offset` on. `backend`: null: nccl on a GPU, gloo elsewhere."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = GROUP
    backend: str | None = None


class GroupName(RequestBody):
    group_name: str = GROUP


class VersionFields(RequestBody):
    """`flush_cache`: this is the last part, and the update is committed. False: it is committed
    once all tensors came. `partial`: an update may lack tensors, which keep their values.
    `weight_version`: null: a name is made up. `selector` and `torch_empty_cache` have no effect:
    the layers of a drafter in the checkpoint are updated too, and temporary memory is freed."""

    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    partial: bool = False
    selector: Literal["target", "draft", "all"] = "all"
    torch_empty_cache: bool = False


class DistributedBody(VersionFields):
    names: Names
    dtypes: Names
    shapes: Shapes
    group_name: str = GROUP
    load_format: str | None = None


class TensorBody(VersionFields):
    """`serialized_named_tensors`, SGLang's pickles, are refused."""

    tensors: list[TensorEntry] = Field(default_factory=list, max_length=MAX_TENSORS)
    buffers: list[BufferEntry] = Field(default_factory=list)
    serialized_named_tensors: Any = None
    load_format: str | None = None


class SelectorBody(RequestBody):
    selector: Literal["target", "draft", "all"] = "all"


class InitInfo(RequestBody):
    """Empty for tensors in shared memory."""

    master_address: str | None = None
    master_port: int = 0
    rank_offset: int = 1
    world_size: int = 0
    backend: str | None = None
    packed: bool = False


class InitBody(RequestBody):
    init_info: InitInfo


class StartBody(RequestBody):
    is_checkpoint_format: bool = True


class UpdateInfo(RequestBody):
    """`names`, `dtype_names` and `shapes` of tensors that are broadcast, or `tensors` and
    `buffers`."""

    names: Names = Field(default_factory=list)
    dtype_names: Names = Field(default_factory=list)
    shapes: Shapes = Field(default_factory=list)
    tensors: list[TensorEntry] = Field(default_factory=list, max_length=MAX_TENSORS)
    buffers: list[BufferEntry] = Field(default_factory=list)
    packed: bool = False
    ipc_handles: Any = None
    ipc_handles_pickled: Any = None


class UpdateBody(RequestBody):
    update_info: UpdateInfo


class FinishBody(RequestBody):
    weight_version: str | None = None
    partial: bool = False


class TransferBody(RequestBody):
    """One step of an update. `kind`: name of the transfer, and `name` of its connection, of open,
    close and part. `info`: of open. `commit`: of a part, the last one; false: commit once all
    tensors came. `update`: the id of the update."""

    step: Literal["open", "close", "begin", "part", "commit", "cancel"]
    kind: str = ""
    name: str = ""
    info: dict[str, Any] = Field(default_factory=dict)
    tensors: list[TensorEntry] = Field(default_factory=list, max_length=MAX_TENSORS)
    buffers: list[BufferEntry] = Field(default_factory=list)
    layout: Literal["separate", "flattened"] = "separate"
    update: str = ""
    version: str | None = None
    commit: bool | None = None
    partial: bool = False
    abort: bool = False


@router.post("/transfer_weights", responses=responds_with(WeightResult))
async def transfer_weights(request: TransferBody, services: ServicesDep) -> Any:
    """One step of an update of the weights by a trainer's tensors."""
    check_version(request.version, "version")
    fields = request.model_dump(exclude={"tensors", "buffers", "layout"})
    if request.step == "part":
        fields["part"] = make_part(request.tensors, request.buffers, request.layout)
    return await _send(services, **fields)


# SGLang -------------------------------------------------------------------------------------------


@router.post("/init_weights_update_group", dependencies=[SMALL_BODY], responses=responds_with(WeightResult))
async def init_group(request: GroupBody, services: ServicesDep) -> Any:
    """Join a process group of a trainer; the response comes when all ranks have joined."""
    return await _open_group(services, request.group_name, request.model_dump())


@router.post("/destroy_weights_update_group", dependencies=[SMALL_BODY], responses=responds_with(WeightResult))
async def destroy_group(services: ServicesDep, request: GroupName | None = None) -> Any:
    """Leave a process group."""
    return await _send(services, step="close", kind="group", name=GROUP if request is None else request.group_name)


@router.post("/update_weights_from_distributed", responses=responds_with(WeightResult))
async def update_from_distributed(request: DistributedBody, services: ServicesDep) -> Any:
    """Receive tensors that the trainer broadcasts in a group."""
    check_version(request.weight_version)
    if request.load_format not in (None, "flattened_bucket"):
        raise ApiError(400, "load_format is null or flattened_bucket", "load_format")
    tensors = list_tensors(request.names, request.dtypes, request.shapes, "dtypes")
    part = make_part(tensors, (), "flattened" if request.load_format else "separate")
    return await _send(services, step="part", kind="group", name=request.group_name, part=part, **_version_fields(request))


@router.post("/update_weights_from_tensor", responses=responds_with(WeightResult))
async def update_from_tensor(request: TensorBody, services: ServicesDep) -> Any:
    """Read tensors from memory that the trainer shares on this host."""
    check_version(request.weight_version)
    if request.serialized_named_tensors is not None:
        raise ApiError(400, PICKLED.format(field="serialized_named_tensors"), "serialized_named_tensors")
    if request.load_format is not None:
        raise ApiError(400, "load_format has no other value than null here", "load_format")
    part = make_part(request.tensors, request.buffers)
    return await _send(services, step="part", kind="ipc", part=part, **_version_fields(request))


@router.post("/begin_weight_update", dependencies=[SMALL_BODY], responses=responds_with(WeightResult))
async def begin_update(services: ServicesDep, request: SelectorBody | None = None) -> Any:
    """Begin an update, which `/end_weight_update` commits."""
    return await _send(services, step="begin")


@router.post("/end_weight_update", dependencies=[SMALL_BODY], responses=responds_with(WeightResult))
@router.post("/finish_weight_update", dependencies=[SMALL_BODY], responses=responds_with(WeightResult))
async def finish_update(services: ServicesDep, request: FinishBody | None = None) -> Any:
    """Commit the update in progress."""
    body = request or FinishBody()
    check_version(body.weight_version)
    return await _send(services, step="commit", version=body.weight_version, partial=body.partial)


@router.post("/cancel_weight_update", dependencies=[SMALL_BODY], responses=responds_with(WeightResult))
async def cancel_update(services: ServicesDep) -> Any:
    """End the update in progress. If it has written tensors, the engine restarts with the weights
    that it served."""
    return await _send(services, step="cancel")


# vLLM ---------------------------------------------------------------------------------------------


@router.get("/get_world_size", responses=responds_with(WorldSize))
async def get_world_size(services: ServicesDep, include_dp: bool = True) -> Any:
    """The number of ranks that join a trainer's group."""
    plan = services.resolved.plan
    return {"world_size": plan.num_ranks * (plan.num_replicas if include_dp else 1)}


@router.post("/init_weight_transfer_engine", dependencies=[SMALL_BODY], responses=responds_with(WeightResult))
async def init_transfer(request: InitBody, services: ServicesDep) -> Any:
    """Join a torch process group of a trainer, or, without an address, nothing. (vLLM's own NCCL
    communicator is no torch group and cannot connect.)"""
    info = request.init_info
    _refuse_packed(info.packed, "init_info.packed")
    if info.master_address is None:
        return await _send(services, step="open", kind="ipc")
    return await _open_group(services, GROUP, {**info.model_dump(exclude={"packed"}), "group_name": GROUP})


@router.post("/start_weight_update", dependencies=[SMALL_BODY], responses=responds_with(WeightResult))
async def start_update(services: ServicesDep, request: StartBody | None = None) -> Any:
    """Begin an update, which `/finish_weight_update` commits."""
    if request is not None and not request.is_checkpoint_format:
        raise ApiError(400, "tensors have the names of the checkpoint; leave is_checkpoint_format true", "is_checkpoint_format")
    return await _send(services, step="begin")


@router.post("/update_weights", responses=responds_with(WeightResult))
async def update_weights(request: UpdateBody, services: ServicesDep) -> Any:
    """Receive one part of the update in progress."""
    info = request.update_info
    for field in ("ipc_handles", "ipc_handles_pickled"):
        if getattr(info, field) is not None:
            raise ApiError(400, PICKLED.format(field=field), f"update_info.{field}")
    _refuse_packed(info.packed, "update_info.packed")
    if info.tensors:
        return await _send(services, step="part", kind="ipc", part=make_part(info.tensors, info.buffers))
    tensors = list_tensors(info.names, info.dtype_names, info.shapes, "dtype_names")
    return await _send(services, step="part", kind="group", name=GROUP, part=make_part(tensors))


# --------------------------------------------------------------------------------------------------


def make_part(tensors: Any, buffers: Any = (), layout: str = "separate") -> dict[str, Any]:
    """The part as the engine takes it."""
    return {
        "tensors": [msgspec.to_builtins(each) if isinstance(each, TensorSpec) else _entry(each) for each in tensors],
        "buffers": [msgspec.to_builtins(SharedBuffer(**each.model_dump())) for each in buffers],
        "layout": layout,
    }


def _entry(entry: TensorEntry) -> dict[str, Any]:
    return {**entry.model_dump(), "dtype": entry.dtype.removeprefix("torch.")}


def list_tensors(names: list[str], dtypes: list[str], shapes: list[list[int]], dtypes_field: str) -> list[TensorSpec]:
    """The tensors of parallel lists. Raises ApiError."""
    if not len(names) == len(dtypes) == len(shapes):
        raise ApiError(400, f"names, {dtypes_field} and shapes have {len(names)}, {len(dtypes)} and {len(shapes)} entries", "names")
    triples = zip(names, dtypes, shapes, strict=True)
    return [TensorSpec(name, dtype.removeprefix("torch."), tuple(shape)) for name, dtype, shape in triples]


def check_version(version: str | None, field: str = "weight_version") -> None:
    if version is not None and (not 0 < len(version) <= MAX_VERSION_LENGTH or not version.isprintable()):
        raise ApiError(400, f"{field} has 1 to {MAX_VERSION_LENGTH} printable characters", field)


def _refuse_packed(packed: bool, field: str) -> None:
    if packed:
        raise ApiError(400, "tensors are broadcast one by one; leave packed false", field)


def _version_fields(request: VersionFields) -> dict[str, Any]:
    return {
        "version": request.weight_version,
        "commit": request.flush_cache,
        "partial": request.partial,
        "abort": request.abort_all_requests,
    }


async def _open_group(services: Services, name: str, info: dict[str, Any]) -> Any:
    backend = info["backend"] or ("nccl" if services.resolved.device == "cuda" else "gloo")
    return await _send(services, step="open", kind="group", name=name, info={**info, "backend": backend})


async def _send(services: Services, **arguments: Any) -> dict[str, Any]:
    """Have the engine carry out a step."""
    try:
        reply = await services.client.send_command("transfer_weights", **arguments)
    except OverflowError:
        raise ApiError(400, "a number of this step is out of range; all must fit in 64 bits") from None
    except (EngineDeadError, TimeoutError) as error:
        raise ApiError(503, str(error), retry_after=RETRY_AFTER) from None
    if not reply.ok:
        raise ApiError(STATUSES.get(reply.code, 500), reply.error or "the step failed")
    version = reply.data.get("weight_version")
    message = "the weights are updated" if version is not None else f"{arguments['step']}: done"
    return {"success": True, "message": message, "update_id": reply.data.get("update"), "weight_version": version}
