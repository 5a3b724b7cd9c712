"""The base class of the in-tree HTTP extensions, whose routers are made at import."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from frame.core.interfaces.http import HttpExtension

if TYPE_CHECKING:
    from fastapi import APIRouter


class BuiltInRoutes(HttpExtension):
    """Returns `routers`."""

    routers: ClassVar[tuple[APIRouter, ...]]

    def make_routers(self) -> tuple[APIRouter, ...]:
        return self.routers
