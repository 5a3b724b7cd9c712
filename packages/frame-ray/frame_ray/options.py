"""Options of the launcher `ray`: data only, read by its record. Must not import ray."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class RayOptions(BaseModel):
    """`plugins.options` of `launcher/ray`."""

    model_config = ConfigDict(extra="forbid")

    address: str = Field("auto", description="HOST:PORT of the Ray cluster. auto: RAY_ADDRESS, or the cluster of this host.")
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Ray resources of a rank. Empty: one GPU where the cluster has any, otherwise one CPU."
    )
    patience: float = Field(60.0, gt=0, description="Seconds for Ray to reserve the hosts and start their actors.")
