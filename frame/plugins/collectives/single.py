"""The collective `single`: a group of one rank."""

from __future__ import annotations

from frame.core.interfaces.collective import LocalGroup


class Single(LocalGroup):
    """One rank alone: the address is not used."""
