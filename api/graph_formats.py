"""The forms that a graph is written in, by the names that clients and the command line have for them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from .graph_svg import to_svg
from .graph_text import to_mermaid
from .model_graph import ModelGraph


class GraphFormat(NamedTuple):
    media_type: str
    write: Callable[[ModelGraph], str]


def _to_json(graph: ModelGraph) -> str:
    return msgspec.json.encode(graph).decode()


GRAPH_FORMATS: Mapping[str, GraphFormat] = {
    "json": GraphFormat("application/json", _to_json),
    "mermaid": GraphFormat("text/plain", to_mermaid),
    "svg": GraphFormat("image/svg+xml", to_svg),
}
