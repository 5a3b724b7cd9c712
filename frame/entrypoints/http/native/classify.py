"""The route `/v1/classify` of vLLM: class probabilities of texts. Must not depend on the engine."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np

from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.native.pooling import PoolingRequestFields, check_count, compute_vectors, list_reply
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_starter import Caller
from frame.entrypoints.http.response_models.native import ClassificationList
from frame.entrypoints.http.services import Services

router = ApiRouter(access=Access.USER)


class ClassifyRequest(PoolingRequestFields):
    input: str | list[str]


@router.post("/v1/classify", responses=responds_with(ClassificationList))
@router.post("/classify", responses=responds_with(ClassificationList))
async def classify(request: ClassifyRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Classify texts."""
    vectors, count = await classify_texts(context, services, request)
    names = get_labels(services)
    data = (
        {"index": index, "label": names[int(row.argmax())], "probs": row.tolist(), "num_classes": len(names)}
        for index, row in enumerate(vectors)
    )
    return list_reply(services, f"classify-{uuid.uuid4().hex}", data, count, vectors.size, {"labels": names})


async def classify_texts(context: Caller, services: Services, request: ClassifyRequest) -> tuple[np.ndarray, int]:
    """(probabilities float32 [texts, labels], number of prompt tokens). Raises ApiError."""
    services.need_task("classify")
    texts = [request.input] if isinstance(request.input, str) else request.input
    check_count(len(texts), "input")
    vectors, count = await compute_vectors(context, services, request, texts, ("classify",))
    names = get_labels(services)
    if len(names) != vectors.shape[1]:
        raise ApiError(500, f"the model has {vectors.shape[1]} outputs, and its config.json names {len(names)} classes")
    return vectors, count


def get_labels(services: Services) -> list[str]:
    """The names of a classifier's outputs, in order."""
    pooling = services.resolved.pooling
    return list(pooling.label_tokens if pooling and pooling.label_tokens else services.resolved.model.labels)
