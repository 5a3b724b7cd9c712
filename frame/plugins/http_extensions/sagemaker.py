"""The HTTP extension `sagemaker`: the routes of a SageMaker container."""

from __future__ import annotations

from frame.entrypoints.http.dialects import sagemaker
from frame.plugins.http_extensions.built_in import BuiltInRoutes


class SageMakerRoutes(BuiltInRoutes):
    """The routers of the API."""

    routers = (sagemaker.router, sagemaker.public_router)
