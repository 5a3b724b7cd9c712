"""`FormReader`: reads multipart/form-data (RFC 7578) in pieces as they arrive, and holds no more
than the headers of one part. Used by the routes that take files. Must not depend on a route or a
file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from frame.entrypoints.http.errors import ApiError

MAX_PARTS = 16
LARGEST_HEAD = 16 * 1024  # bytes of a part's headers
_BOUNDARY = re.compile(r'multipart/form-data;.*boundary="?([^";,\s]{1,200})"?', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="?([^";\r\n]*)"?', re.IGNORECASE)
_FILENAME = re.compile(rb'[;\s]filename="([^"\r\n]*)"', re.IGNORECASE)


class FormPart(NamedTuple):
    """`name` is empty where the part gives none; `filename` is None where it is a plain field."""

    name: str
    filename: str | None


class FormReader:
    """One body. `content_type`: its header. `fields`: those that the route takes, for errors.
    Raises ApiError for a header without a boundary."""

    def __init__(self, content_type: str, fields: str = "file and purpose") -> None:
        self._fields = fields
        boundary = _BOUNDARY.match(content_type)
        if boundary is None:
            raise ApiError(400, f"the body must be multipart/form-data with the fields {fields}", "file")
        self._mark = b"\r\n--" + boundary[1].encode("latin-1")
        self._kept = bytearray(b"\r\n")  # bytes that were not returned; the first mark may be the beginning of the body
        self._is_head = False
        self._part: FormPart | None = None  # None: before the first one
        self._num_parts = 0
        self._is_over = False

    def feed(self, piece: bytes) -> Iterator[tuple[FormPart, bytes]]:
        """Parts and pieces of their contents; the first of each part is empty. Raises ApiError."""
        self._kept += piece
        while not self._is_over:
            if self._is_head:
                if not self._read_head():
                    return
                assert self._part is not None
                yield self._part, b""
            end = self._kept.find(self._mark)
            content = bytes(self._kept[: end if end >= 0 else max(0, len(self._kept) - len(self._mark) + 1)])
            del self._kept[: len(content) if end < 0 else end + len(self._mark)]
            if content and self._part is not None:
                yield self._part, content
            if end < 0:
                return
            self._is_head = True

    def close(self) -> None:
        """End the body. Raises ApiError for an incomplete one."""
        if not self._is_over:
            raise ApiError(400, "the multipart body is cut off or has another boundary than its header says", "file")

    def _read_head(self) -> bool:
        """Whether a part begins: its headers are complete."""
        if len(self._kept) < 2:
            return False
        if self._kept.startswith(b"--"):
            self._is_over = True
            self._kept.clear()
            return False
        end = self._kept.find(b"\r\n\r\n")
        if max(end, len(self._kept) if end < 0 else 0) > LARGEST_HEAD:
            raise ApiError(400, f"the headers of a part are larger than {LARGEST_HEAD} bytes; send the fields {self._fields}", "file")
        if end < 0:
            return False
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ApiError(400, f"the body has more than {MAX_PARTS} parts; send the fields {self._fields}", "file")
        self._part = _part_of(bytes(self._kept[:end]))
        del self._kept[: end + 4]
        self._is_head = False
        return True


def _part_of(head: bytes) -> FormPart:
    line = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition:")), b"")
    name, filename = _NAME.search(line), _FILENAME.search(line)
    return FormPart(
        name[1].decode("utf-8", "replace") if name is not None else "",
        filename[1].decode("utf-8", "replace") if filename is not None else None,
    )
