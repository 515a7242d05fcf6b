"""Indexes by name."""

from __future__ import annotations

from kvtailor.indexes.base import Index
from kvtailor.indexes.channels import ChannelsIndex
from kvtailor.indexes.codes import CodesIndex
from kvtailor.indexes.pages import PagesIndex
from kvtailor.indexes.pq import PQIndex

_CLASSES: dict[str, type[Index]] = {index.name: index for index in (CodesIndex, ChannelsIndex, PQIndex, PagesIndex)}
INDEX_NAMES = tuple(_CLASSES)


def index_class(name: str) -> type[Index]:
    """The class of an index that ``INDEX_NAMES`` holds."""
    return _CLASSES[name]
