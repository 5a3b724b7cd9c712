"""The HTTP extension `sagemaker`: the routes of a SageMaker container."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.dialects import sagemaker

if TYPE_CHECKING:
    from fastapi import APIRouter


class SageMakerRoutes(HttpExtension):
    """Returns the routers of the API."""

    def make_routers(self) -> Sequence[APIRouter]:
        return (sagemaker.router, sagemaker.public_router)
