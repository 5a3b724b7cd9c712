"""Builds the tiers of an engine: the mover over its KV pool, the tiers, and their controller.

Used by the builders of `frame.entrypoints.processes`. Must not know a tier by name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from frame.core.errors import ConfigurationError
from frame.core.interfaces.cache_groups import RESERVED_PAGES
from frame.core.interfaces.kv_tier import BlockMover, KVTier, KVTierCapabilities, KVTierContext, TransferSettings
from frame.core.interfaces.parallel import ONE_RANK, ParallelPlan
from frame.core.interfaces.platform import Platform, SupportsPinning, SupportsStreams
from frame.core.kv_cache.kv_pool import KVPool
from frame.host.authenticated_link import read_key
from frame.host.kept_memory import KeptMemory, open_kept
from frame.kv_tiers.block_keys import MAX_BLOCKS
from frame.kv_tiers.block_layout import KINDS
from frame.kv_tiers.controller import NamedTier, TierController, TierOptions, WritePolicy
from frame.kv_tiers.follower import TierFollower
from frame.kv_tiers.key_secret import make_secret, read_secret
from frame.kv_tiers.mover import ChecksEarly, PoolBlockMover
from frame.kv_tiers.ranked_tier import NO_BLOCK, GroupRanks, KeyTier, NoMover, OrderSender, RankedMover, RankedTier

if TYPE_CHECKING:
    from frame.config.resolved import PluginChoice, Resolved
    from frame.core.kv_cache.geometry import KVGeometry
    from frame.core.scheduling.kv_cache_manager import KVCacheManager

BLOCK_FORMAT = 1  # of the bytes of a block; raised where `PageCopies` orders them anew, or a model computes others
KIND = "kv_tier"
GIB = 1 << 30
SETTING = "disaggregation.mode"  # that needs the secret of peers
SWITCH_INTERVAL = 0.0005  # seconds after which the thread that launches steps lets one of a transfer go on
DEFAULT_FOLDER = "~/.cache/frame"  # of the secret, where no tier has a folder
_COMPUTING = ("model", "weight_format", "weight_source", "drafter")  # kinds of plugins that keys and values depend on
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenTier:
    """A tier of the configuration. `options`: of one rank, by name."""

    name: str
    capabilities: KVTierCapabilities
    create: Callable[[KVTierContext], KVTier]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """See `NamedTier.is_local`."""
        return not (self.capabilities.persistent or self.capabilities.shared)

    def count_blocks(self, block_bytes: int, pool_bytes: int) -> tuple[int, int]:
        """-> blocks that the tier holds, and blocks of a load that has buffers for them."""
        can = self.capabilities
        size, ratio = self.options.get(can.size), self.options.get(can.ratio)
        held = MAX_BLOCKS if size is None else int(size * GIB) // block_bytes
        held = held if ratio is None else int(ratio * pool_bytes) // block_bytes
        if can.in_memory or not can.memory:
            return held, held
        buffers = int(sum(self.options[option] for option in can.memory) * GIB) // block_bytes
        return held, max(1, min(held, buffers) // 2)


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What an engine's tiers are built from. model: names the weights and all that the contents of
    a block depend on beside them and the geometry. secret: of the keys."""

    tiers: Sequence[ChosenTier]
    model: str
    secret: bytes
    write_policy: WritePolicy
    min_load_tokens: int
    plan: ParallelPlan = ONE_RANK
    transfer: TransferSettings | None = None  # without the properties of the cache
    kept: KeptMemory | None = None  # of the rank
    waits_for_steps: bool = True  # see `PoolBlockMover`


def prepare_tiers(resolved: Resolved, describe: Callable[[str], Any], create: Callable[[PluginChoice, Any], KVTier]) -> TierSettings:
    """The settings of the configuration's tiers. describe: -> the capabilities of a tier. create:
    builds the plugin of a choice. Raises ConfigurationError if the secret of a folder cannot be
    used."""
    choices, cache = resolved.plugins[KIND], resolved.user.cache
    tiers, folders = list[ChosenTier](), list[str]()
    for choice in choices:
        described = describe(choice.name)
        can = described if isinstance(described, KVTierCapabilities) else KVTierCapabilities()
        options = divide_options(can, choice.options, resolved.plan)
        tiers.append(ChosenTier(choice.name, can, partial(create, choice.model_copy(update={"options": options})), options))
        if can.folder:
            folders.append(choice.options[can.folder])
    kept = _open_kept()
    if not all(tier.is_local for tier in tiers):
        secret = read_secret(Path(next(iter(folders), DEFAULT_FOLDER)).expanduser().absolute())
    else:
        secret = make_secret() if kept is None else kept.secret
    # Commits wait for rank 0's device alone, and drafts are computed after what they wait for.
    waits = resolved.plan.num_ranks > 1 or bool(resolved.plugins.get("drafter"))
    policies = cache.write_policy, cache.min_load_tokens
    return TierSettings(tiers, digest_model(resolved), secret, *policies, resolved.plan, _prepare_transfer(resolved), kept, waits)


def _open_kept() -> KeptMemory | None:
    """The memory of this rank that outlives its process; None: there is none."""
    try:
        return open_kept()
    except OSError as error:
        _log.warning("blocks of KV cache tiers will end with this process: %s", error)
        return None


def _prepare_transfer(resolved: Resolved) -> TransferSettings | None:
    """See `TierSettings.transfer`. Raises ConfigurationError without the secret of the peers."""
    section = resolved.user.disaggregation
    if section.mode is None:
        return None
    secret = read_key(SETTING, "server")
    about = {"model.dtype": resolved.dtype, "cache.kv_dtype": resolved.kv_dtype, "model.max_context": str(resolved.max_context)}
    return TransferSettings(section.mode, section.host, section.port, secret, about)


def divide_options(can: KVTierCapabilities, options: Mapping[str, Any], plan: ParallelPlan) -> dict[str, Any]:
    """The options of each rank's tier, where those of `options` are for all ranks of a replica
    together. Attention groups share a shared tier."""
    places = plan.num_ranks // plan.num_groups
    counts = {can.size: places if can.shared else plan.num_ranks, **dict.fromkeys(can.memory, plan.num_ranks)}
    return {name: value if value is None or name not in counts else value / counts[name] for name, value in options.items()}


def check_groups(geometry: KVGeometry, settings: TierSettings) -> None:
    """Raise ConfigurationError if the model has cache groups that tiers do not keep."""
    others = sorted({group.kind for group in geometry.groups if group.kind not in KINDS})
    if others:
        kinds = " and ".join(others)
        raise ConfigurationError(
            f"cache.tiers is set, but the model has a KV cache of kind {kinds}, and tiers keep {' and '.join(KINDS)} alone; "
            "leave cache.tiers out"
        )
    if geometry.num_pools == 1:
        return
    if settings.write_policy == "write_back":
        raise ConfigurationError(
            "cache.write_policy is write_back, which stores single pages, but a match of this model needs windows or states beside them; "
            "set cache.write_policy to write_through"
        )
    further = " and ".join(sorted({group.kind for group in geometry.groups[1 : geometry.num_pools]}))
    if settings.transfer is not None:
        raise ConfigurationError(
            f"disaggregation.mode is {settings.transfer.mode}, but the model has a KV cache of kind {further}, which is not handed "
            "from server to server; leave disaggregation.mode out"
        )
    if settings.plan.pp > 1:
        raise ConfigurationError(
            f"cache.tiers is set, but the model has a KV cache of kind {further}, whose blocks differ between the "
            f"{settings.plan.pp} stages; set parallel.pp to 1, or leave cache.tiers out"
        )


@dataclass(frozen=True, slots=True)
class RankTiers:
    """The tiers of a rank, and its copies."""

    tiers: Sequence[KVTier]
    mover: PoolBlockMover
    pool_bytes: int
    identity: str


def open_tiers(settings: TierSettings, pool: KVPool, platform: Platform, rank: int = 0, num_pages: int = 0) -> RankTiers:
    """The tiers of a rank over its pool. num_pages: of the pool where it will have more. Raises
    ConfigurationError for a model or a tier that cannot be used."""
    check_groups(pool.geometry, settings)
    plan = settings.plan
    stage, tp_rank = divmod(rank, plan.tp)
    identity = describe_blocks(settings.model, pool.geometry, (stage, plan.pp, tp_rank % plan.attention_tp, plan.attention_tp))
    waits = settings.waits_for_steps or pool.geometry.num_pools > 1
    mover = PoolBlockMover(pool, platform, waits_for_steps=waits)
    pages = (max(num_pages, pool.num_pages[0] - RESERVED_PAGES), *(count - RESERVED_PAGES for count in pool.num_pages[1:]))
    pool_bytes = sum(count * pieces for count, pieces in zip(pages, mover.layout.num_pieces, strict=True)) * mover.block_bytes
    transfer = settings.transfer
    if transfer is not None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        transfer = replace(transfer, properties={**transfer.properties, **list_properties(settings.model, pool.geometry)})
    context = KVTierContext(
        mover.block_bytes, identity, partial(allocate, platform), partial(pin, platform), pool_bytes, transfer, platform=platform
    )
    tiers: list[KVTier] = []
    kept = settings.kept  # for the first tier that uses it
    try:
        for chosen in settings.tiers:
            if kept is not None and chosen.capabilities.keeps:
                tiers.append(chosen.create(replace(context, map_kept=kept.map, kept_bytes=kept.num_bytes)))
                kept = None
            else:
                tiers.append(chosen.create(context))
    except BaseException:
        for tier in tiers:
            tier.close()
        mover.close()
        raise
    for tier in tiers:
        if isinstance(tier, ChecksEarly):
            mover.on_stored = tier.note_copied
    names = ", ".join(tier.name for tier in settings.tiers)
    _log.info("KV cache tiers: %s; %d bytes a block of %d tokens", names, mover.block_bytes, pool.page_size)
    return RankTiers(tiers, mover, pool_bytes, identity)


def check_tiers(settings: TierSettings, geometry: KVGeometry, num_pages: int, rank: int, platform: Platform) -> None:
    """Open the tiers of a rank and close them, without its pool, as on its platform: a tier may use
    the memory of the device. Raises as `open_tiers`."""
    check_groups(geometry, settings)
    pool = KVPool(geometry, RESERVED_PAGES + 1, platform.device)
    opened = open_tiers(settings, pool, platform, rank, num_pages)
    for tier in opened.tiers:
        tier.close()
    opened.mover.close()


def build_follower(settings: TierSettings, pool: KVPool, platform: Platform, rank: int) -> TierFollower:
    """The tiers of a rank that carries out rank 0's orders. Raises as `open_tiers`."""
    opened = open_tiers(settings, pool, platform, rank)
    return TierFollower(opened.tiers, opened.mover)


class ControllerBuilder:
    """Builds the tiers behind the prefix caches of rank 0's schedulers. `sender`: to the other
    ranks; None: there is one rank."""

    def __init__(self, settings: TierSettings, pool: KVPool, platform: Platform, sender: OrderSender | None = None) -> None:
        self._settings, self._pool, self._platform, self._sender = settings, pool, platform, sender
        self._opened: RankTiers | None = None

    def build(self, group: int, kv_manager: KVCacheManager) -> TierController:
        """The tiers of an attention group; those of group 0 are built first. Raises as
        `open_tiers`."""
        if self._opened is None:
            self._opened = open_tiers(self._settings, self._pool, self._platform)
        opened, settings = self._opened, self._settings
        tiers, mover = self._lead(opened, group)
        named = [
            NamedTier(
                chosen.name, tier, chosen.is_local, chosen.capabilities.in_memory, "DISK" if chosen.capabilities.persistent else "CPU"
            )
            for chosen, tier in zip(settings.tiers, tiers, strict=True)
        ]
        options = TierOptions(
            settings.secret,
            opened.identity,
            settings.write_policy,
            settings.min_load_tokens,
            self._pool.num_pages[0],
            opened.mover.layout,
        )
        return TierController(named, mover, kv_manager, options)

    def _lead(self, opened: RankTiers, group: int) -> tuple[Sequence[KVTier], BlockMover]:
        """The tiers and the mover of a group, of all its ranks."""
        plan = self._settings.plan
        members = [rank for rank in range(plan.num_ranks) if plan.find_group(rank) == group]
        others = [rank for rank in members if rank]
        if not others or self._sender is None:
            return opened.tiers, opened.mover
        ranks = GroupRanks(self._sender, group, others)
        if 0 in members:
            scratch = allocate(self._platform, opened.mover.block_bytes)
            return [RankedTier(tier, number, ranks, scratch) for number, tier in enumerate(opened.tiers)], RankedMover(opened.mover, ranks)
        tiers = []
        for number, (chosen, tier) in enumerate(zip(self._settings.tiers, opened.tiers, strict=True)):
            max_blocks, max_match = chosen.count_blocks(opened.mover.block_bytes, opened.pool_bytes)
            keys = KeyTier(max_blocks, max_match, tier if chosen.capabilities.shared else None)
            tiers.append(RankedTier(keys, number, ranks, NO_BLOCK))
        return tiers, RankedMover(NoMover(), ranks)


def allocate(platform: Platform, num_bytes: int) -> torch.Tensor:
    """See `KVTierContext.allocate`."""
    if isinstance(platform, SupportsStreams):
        platform.activate()
        return platform.allocate_pinned((num_bytes,), torch.uint8).zero_()
    return torch.from_numpy(np.zeros(num_bytes, np.uint8))  # pages that are never written do not become resident


def pin(platform: Platform, memory: torch.Tensor) -> None:
    """See `KVTierContext.pin`."""
    if isinstance(platform, SupportsPinning):
        platform.activate()  # for the tier's thread, which would use another device
        platform.pin_memory(memory)


def describe_blocks(model: str, geometry: KVGeometry, place: Sequence[int] = (0, 1, 0, 1)) -> str:
    """The identity of blocks of this model with this geometry. place: of the rank; its stage, their
    number, its rank in the attention group, and their number."""
    groups = [(group.kind, [str(layer) for layer in group.layers]) for group in geometry.groups]
    return json.dumps([BLOCK_FORMAT, model, geometry.page_size, str(geometry.dtype), groups, *place])


def list_properties(model: str, geometry: KVGeometry) -> dict[str, str]:
    """What blocks of this model depend on, by the names that operators know."""
    layers = ", ".join(f"{len(group.layers)} of {group.kind}" for group in geometry.groups)
    digest = hashlib.blake2b(repr([[str(layer) for layer in group.layers] for group in geometry.groups]).encode(), digest_size=8)
    return {
        "the format of blocks": str(BLOCK_FORMAT),
        "cache.page_size": str(geometry.page_size),
        "the type of cached keys and values": str(geometry.dtype),
        "the number of cached layers": layers,
        "the digest of the cache's layout": digest.hexdigest(),
        "the digest of model and checkpoint": model[:16],
    }


def digest_model(resolved: Resolved) -> str:
    """A digest of all that computes keys and values: model, dtypes, plugins, and the files of the
    checkpoints by their names, sizes and times of change. Contents are not read, which would take
    minutes."""
    user = resolved.user
    plugins = [choice.model_dump() for kind in _COMPUTING for choice in resolved.plugins.get(kind, ())]
    values = [asdict(resolved.model), resolved.dtype, resolved.kv_dtype, resolved.max_context, user.model.seed, plugins]
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=32)
    for folder in (resolved.weights_folder, user.speculative.draft_model_path):
        for file in sorted(Path(folder).iterdir()) if folder else ():
            if file.is_file():
                status = file.stat()
                digest.update(json.dumps([file.name, status.st_size, status.st_mtime_ns]).encode())
    return digest.hexdigest()
