"""Manifest of the in-tree tracers: records only. Must not import the plugins."""

from __future__ import annotations

from pydantic import Field

from frame.interfaces.tracing import TracerCapabilities
from frame.registration import KindRegistry, PluginOptions, hookimpl


class JsonLinesOptions(PluginOptions):
    """Settings of `json_lines`. `folder`: where each process writes PROCESS.jsonl. `max_bytes`: of
    a file, which then becomes PROCESS.jsonl.1 in place of an older one."""

    folder: str = "traces"
    max_bytes: int = Field(64 << 20, ge=1024)


@hookimpl
def register_tracers(registry: KindRegistry) -> None:
    """Add the in-tree tracers."""
    registry.add(
        "otlp",
        "frame.plugins.tracers.otlp:OtlpTracer",
        capabilities=TracerCapabilities(needs_endpoint=True),
        requires=("opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30"),
        summary="OpenTelemetry, by OTLP over HTTP.",
    )
    registry.add(
        "json_lines",
        "frame.plugins.tracers.json_lines:JsonLinesTracer",
        options=JsonLinesOptions,
        rank=-1,
        summary="One JSON object a line, in a file of each process.",
    )
