"""A plugin folder: the logits processor `scripted`. The manifest is light, as the processor's
imports take seconds on a busy machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from frame import hookimpl
from frame.core.interfaces.sampling import ProcessorCapabilities


class Options(BaseModel):
    """`script`: the file that `processor` describes."""

    script: Path


@hookimpl
def register_logits_processors(registry: Any) -> None:
    target, api = f"{__name__}.processor:Scripted", "logits_processor/3"
    registry.add("scripted", target, capabilities=ProcessorCapabilities(), options=Options, api=api, summary="Says a script.")
