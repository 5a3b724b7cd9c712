"""`check_fields`: bounds the fields of a protobuf message on its bytes, before they are decoded.

An empty message or text takes two bytes on the wire and some hundred as an object of Python. Used
by `MessageReader`. Must not know a method.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.protocol.bodies import MAX_NODES

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types
_MAX_VARINT = 10  # bytes
# Bytes of an element of a packed list, by its type; others have a variable length
_WIDTHS = {
    FieldDescriptor.TYPE_DOUBLE: 8, FieldDescriptor.TYPE_FIXED64: 8, FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_FIXED32: 4, FieldDescriptor.TYPE_SFIXED32: 4,
}  # fmt: skip
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)

Fields = dict[int, Any]  # tag of a field with a length -> `Fields` of a message, or the width of an element (0: variable)


def check_fields(kind: Any, data: bytes, max_values: int) -> None:
    """Raise ApiError 400 for a message of class `kind` with more than `MAX_NODES` fields, those of
    its messages included, or more than `max_values` elements of packed lists. Takes up to 20
    ms."""
    try:
        _Counter(data, max_values).count(_fields_of(kind.DESCRIPTOR), 0, len(data))
    except (IndexError, ValueError):
        raise malformed(kind) from None


def malformed(kind: Any) -> ApiError:
    return ApiError(400, f"the bytes are not a valid {kind.DESCRIPTOR.full_name} message; send what frame.proto describes")


class _Counter:
    """Counts what is left of both bounds. Raises IndexError or ValueError for bytes that are no
    message."""

    def __init__(self, data: bytes, max_values: int) -> None:
        self._data = data
        self._max_values = max_values
        self._fields_left = MAX_NODES
        self._values = max_values

    def count(self, fields: Fields, at: int, end: int) -> None:
        """Count the fields from `at` to `end`."""
        data = self._data
        while at < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise ApiError(400, f"the message holds more than {MAX_NODES} fields and list entries; send less at once")
            tag, at = data[at], at + 1
            if tag > 127:
                tag, at = self._read_varint(at - 1)
            kind = tag & 7
            if kind == _LENGTH:
                size, at = data[at], at + 1
                if size > 127:
                    size, at = self._read_varint(at - 1)
                if at + size > end:
                    raise ValueError("the field is longer than its message")
                if size and (inner := fields.get(tag)) is not None:
                    if isinstance(inner, dict):
                        self.count(inner, at, at + size)
                    else:
                        self._count_values(at, size, inner)
                at += size
            elif kind == _VARINT:
                at = self._read_varint(at)[1]
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                raise ValueError("groups are not used")
        if at != end:
            raise ValueError("the last field is longer than its message")

    def _count_values(self, at: int, size: int, width: int) -> None:
        self._values -= size // width if width else int(np.count_nonzero(np.frombuffer(self._data, np.uint8, size, at) < 128))
        if self._values < 0:
            raise ApiError(400, f"the message holds more than {self._max_values} values; send less at once")

    def _read_varint(self, at: int) -> tuple[int, int]:
        """(the number that begins at `at`, where it ends)."""
        byte = self._data[at]
        if byte < 128:
            return byte, at + 1
        number = byte & 127
        for index in range(1, _MAX_VARINT):
            byte = self._data[at + index]
            number |= (byte & 127) << 7 * index
            if byte < 128:
                return number, at + index + 1
        raise ValueError("a number has more than 10 bytes")


@lru_cache(maxsize=256)  # more than frame.proto and the protocols of health and reflection have
def _fields_of(descriptor: Descriptor) -> Fields:
    """The fields of a message that may have a length, texts aside. frame.proto has no message that
    contains itself."""
    fields: Fields = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            fields[field.number << 3 | _LENGTH] = _fields_of(field.message_type)
        elif field.type not in _TEXTS:
            fields[field.number << 3 | _LENGTH] = _WIDTHS.get(field.type, 0)
    return fields
