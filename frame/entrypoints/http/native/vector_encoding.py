"""Encodes vectors for responses: numbers, base64, or bytes, in several types of numbers.

Used by the routes of pooling models. Must not know a request schema or the engine.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import msgspec
import numpy as np

from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.request_context import RequestContext

EmbedDtype = Literal["float32", "float16", "bfloat16"]
MAX_DESCRIBED = 64  # vectors of a response whose header describes them; a header is bounded


def encode_vectors(vectors: np.ndarray, form: str | None, dtype: EmbedDtype | None = None) -> Iterator[Any]:
    """Vectors as lists of numbers or, with form `base64`, as base64 of little-endian numbers of
    `dtype` (float32)."""
    if form == "base64":
        return (base64.b64encode(to_dtype(vector, dtype).tobytes()).decode() for vector in vectors)
    return (vector.tolist() for vector in vectors)


def to_dtype(values: np.ndarray, dtype: EmbedDtype | None) -> np.ndarray:
    """float32 values as little-endian numbers of a type; bfloat16 as uint16, rounded to even."""
    if dtype == "float16":
        return values.astype("<f2")
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
    return values.astype("<f4", copy=False)


async def respond_bytes(context: RequestContext, vectors: np.ndarray, dtype: EmbedDtype | None, head: dict[str, Any] | None) -> None:
    """Send the vectors one after another as bytes. With `head`, the header `metadata` says as JSON
    where each is, as vLLM does. Raises ApiError 400 for too many of them."""
    headers = [(b"content-type", b"application/octet-stream")]
    size = vectors.shape[1] * (4 if dtype in (None, "float32") else 2)
    if head is not None:
        if len(vectors) > MAX_DESCRIBED:
            sentence = f"encoding_format bytes takes {MAX_DESCRIBED} inputs, and there are {len(vectors)}; use bytes_only or base64"
            raise ApiError(400, sentence, "encoding_format")
        kind = {"embed_dtype": dtype or "float32", "endianness": "little", "shape": [vectors.shape[1]]}
        data = [{"index": i, "start": i * size, "end": (i + 1) * size, **kind} for i in range(len(vectors))]
        headers.append((b"metadata", msgspec.json.encode({**head, "data": data})))

    async def rows() -> AsyncIterator[bytes]:
        for vector in vectors:
            yield to_dtype(vector, dtype).tobytes()

    await context.respond_pieces(rows(), size * len(vectors), tuple(headers))
