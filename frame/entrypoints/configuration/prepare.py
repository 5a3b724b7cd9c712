"""`prepare`: resolves a configuration on this machine. It reads plugin records, the checkpoint's
configuration and the hardware, and passes them to the pure function `resolve`.

Used by every command that starts or explains an engine. Loads no plugin and no weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

from frame.checkpoint.folder import check_folder
from frame.checkpoint.hub_cache import find_name
from frame.checkpoint.model_config import check_head, describe_missing, find_model, read_model_config
from frame.checkpoint.remote_code import check_model_code, check_tokenizer_code
from frame.config.hardware import Hardware
from frame.config.resolution.drafter import find_drafter, resolve_draft_model
from frame.config.resolve import resolve
from frame.config.resolved import Resolved
from frame.config.schema import FrameConfig
from frame.config.selection import ResolveError, UnknownPluginError, join_conflicts
from frame.config.server_sections import BatchesSection, PluginsSection, ServerSection
from frame.core.errors import ConfigError, ConfigurationError, PluginError, did_you_mean
from frame.core.interfaces.model import ModelCapabilities
from frame.entrypoints.configuration.find_moves import find_moves
from frame.entrypoints.configuration.hardware_probe import probe
from frame.entrypoints.keys import check_exposure
from frame.entrypoints.moderation import read_policy
from frame.entrypoints.origin import read_cors
from frame.entrypoints.tls import load_certificate
from frame.entrypoints.tracing import check_tracing
from frame.host.installation import install_command
from frame.plugins.loader import FRAME_DISTRIBUTION, load_configured
from frame.plugins.registry import Registry
from frame.text.chat_template import ChatTemplate, find_file, find_template, read_template
from frame.text.tokenizer import read_settings

PACKAGE_CLOSENESS = 0.85  # of an allowed or denied package to an installed one, from which it is taken for a spelling mistake
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The input of a start. `sources`: where each user value is from, for display."""

    resolved: Resolved
    registry: Registry
    hardware: Hardware
    sources: Mapping[str, str] = field(default_factory=dict)


def prepare(
    config: FrameConfig,
    hardware: Hardware | None = None,
    *,
    is_served: bool = False,
    classes: Sequence[type] = (),
    assumed: frozenset[str] = frozenset(),
) -> Prepared:
    """Resolve `config` on this machine. is_served: HTTP and text processes run beside the engine.
    classes: plugins of this process. assumed: distributions that `hardware`, another machine, has.

    Raises ConfigurationError (CheckpointError, ResolveError, PluginError) with a message for the
    user.
    """
    if is_served:
        _check_server(config.server)
        _check_switches(config)
    if FRAME_DISTRIBUTION in config.plugins.deny:
        raise ConfigError(f"plugins.deny names {FRAME_DISTRIBUTION}, whose plugins are always read; remove it")
    registry = load_configured(config.plugins, classes, assumed)
    for broken in registry.broken:
        _log.warning("plugin not read: %s", broken)
    _check_names(config.plugins, registry)
    model_config = replace(read_model_config(config.model.path), chat_template=_chat_template(config))
    read_policy(config.text.moderation_policy)
    if config.text.score_prompt is not None:
        from frame.entrypoints.relevance import read_score_prompt  # imports numpy

        read_score_prompt(config.text.score_prompt)
    records = registry.all_records()
    machine = replace(hardware or probe(records["platform"]), busy_cores=int(is_served))
    try:
        resolved = resolve(config, machine, model_config, records)
        path = config.speculative.draft_model_path
        drafter = find_drafter(resolved, records)
        if path is not None and drafter.head_field:
            check_head(path, drafter.head_field)
        if path is not None and drafter.loads_model:
            draft = read_model_config(path, "speculative.draft_model_path")
            resolved = resolve_draft_model(resolved, draft, lambda changed: resolve(changed, machine, draft, records))
    except ResolveError as error:
        raise join_conflicts([_describe(conflict, registry) for conflict in error.conflicts]) from None
    for move in find_moves(resolved, machine, model_config, records):
        _log.warning("%s", move)
    if sentence := _describe_long_rope(resolved):
        _log.warning("%s", sentence)
    _check_code(resolved, registry)
    if resolved.draft is not None:
        _check_code(resolved.draft, registry)
    return Prepared(resolved, registry, machine)


def _check_names(plugins: PluginsSection, registry: Registry) -> None:
    """Raise ConfigError for a misspelt name in `plugins.allow` or `plugins.deny`. A denied package
    need not be installed, and a plugin that is not listed may be in one that was not read."""
    records = [record for records in registry.all_records().values() for record in records]
    packages = sorted({record.distribution for record in records if record.distribution} | registry.excluded)
    unmatched = set(registry.unmatched)
    for key, names in (("plugins.allow", plugins.allow or ()), ("plugins.deny", plugins.deny)):
        for name in (name for name in names if name in unmatched):
            if "/" in name:
                hint = did_you_mean(name, [f"{record.kind}/{record.name}" for record in records])
                what, may_be = "plugin", bool(registry.broken or registry.excluded)
            else:
                near = get_close_matches(name, packages, n=1, cutoff=PACKAGE_CLOSENESS)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                what, may_be = "installed package with plugins", bool(registry.broken) or key == "plugins.deny"
            if hint or not may_be:
                raise ConfigError(f"{key} names {name!r}, and there is no such {what}{hint or '; `frame plugins list` lists them.'}")
            _log.warning("%s names %r, and there is no such %s", key, name, what)


def _check_server(server: ServerSection) -> None:
    """Raise ConfigurationError for settings that a start of the server would refuse."""
    check_exposure(server)
    read_cors(server)
    load_certificate(server)
    check_tracing(server)
    if server.grpc_port is not None and any(find_spec(name) is None for name in ("grpc", "grpc_health", "grpc_reflection")):
        raise ConfigurationError(f"server.grpc_port needs grpcio; run {install_command('frame-serve[grpc]')}")
    ports = {"port": server.port, "admin_port": server.admin_port, "grpc_port": server.grpc_port}
    for first, second in combinations([name for name, port in ports.items() if port], 2):
        if ports[first] == ports[second]:
            raise ConfigurationError(f"server.{second} is {ports[second]}, as is server.{first}; choose another port")


def _check_switches(config: FrameConfig) -> None:
    """Raise ConfigurationError for a setting without the one that switches its feature on."""
    for section, switch, names in (("batches", "folder", BatchesSection.model_fields), ("server", "admin_port", ("admin_host",))):
        section_values = getattr(config, section)
        explicit = [name for name in names if getattr(section_values, name) != type(section_values).model_fields[name].default]
        if section == "batches" and config.server.state_dir is not None:
            continue
        if explicit and getattr(section_values, switch) is None:
            raise ConfigurationError(f"{section}.{explicit[0]} is set without {section}.{switch}; give both, or neither")


def _describe(error: ConfigurationError, registry: Registry) -> ConfigurationError:
    """The error; of an unknown plugin, or weights that no format reads, with what the registry says
    of it."""
    if isinstance(error, UnknownPluginError):
        try:
            registry.get(error.kind, error.name)
        except PluginError as known:
            return PluginError(f"{error.key}: {known}")
        return PluginError(str(error))
    if isinstance(error, ResolveError) and error.missing and (remedy := registry.describe_missing("weight_format", error.missing)):
        return PluginError(f"{str(error).splitlines()[0]} The {remedy}")
    return error


def _describe_long_rope(resolved: Resolved) -> str:
    """What the long factors of LongRoPE mean for short prompts; "" if the model rotates with the
    short ones, or in another way."""
    config = resolved.model.config
    stored = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "long_factor" not in stored:
        return ""
    places = (config.get("original_max_position_embeddings"), stored.get("original_max_position_embeddings"))
    original = next((value for value in (*places, config.get("max_position_embeddings")) if value), resolved.model.max_context)
    if resolved.max_context <= original:
        return ""
    return (
        f"the context of {resolved.max_context} tokens exceeds the original {original} of this LongRoPE checkpoint: all requests use its "
        f"long factors, while transformers uses the short ones up to {original} tokens; --max-model-len {original} selects the short ones"
    )


def _check_code(resolved: Resolved, registry: Registry) -> None:
    """Raise CheckpointError if the checkpoint needs its Python code, which
    `model.trust_remote_code` does not allow. Runs none of it."""
    if resolved.user.model.trust_remote_code:
        return
    if resolved.tokenizer_path is not None:
        check_tokenizer_code(Path(resolved.tokenizer_path))
    capabilities = registry.get("model", resolved.choice("model").name).capabilities
    if isinstance(capabilities, ModelCapabilities) and capabilities.architectures is None:
        check_model_code(resolved.model, resolved.model_path)


def _chat_template(config: FrameConfig) -> str:
    """The source of the chat template; "" without one. Raises ConfigurationError."""
    if config.model.skip_tokenizer_init:
        return ""
    folder = find_model(config.model.tokenizer or config.model.path)
    if not folder.is_dir():
        path = config.model.tokenizer or ""
        remedy = describe_missing(path) if find_name(path) else "name a folder with a tokenizer.json"
        raise ConfigError(f"model.tokenizer {path!r} is not a folder; {remedy}")
    check_folder(folder)
    named = config.text.chat_template
    source = read_template(named) if named else find_template(folder, read_settings(folder))
    if source:
        ChatTemplate(source, file=named or find_file(folder))
    return source or ""
