"""The forms that a graph is written in, by the names that clients and the command line have for them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

import msgspec

from .model_graph import EdgeTensor, GraphCluster, GraphEdge, GraphNode, ModelGraph

_SPECIAL = re.compile(r"[^\w .,:=+*/()\[\]<>≤·%'-]|[<>]")
"""Characters that mean something in a Mermaid label, or may; `_` too would do in pairs, but only in Markdown."""


def node_lines(node: GraphNode) -> list[str]:
    """What is to be said of a node: its name, its kind, how it batches, and where the time goes."""
    if node.kind in ("request", "response"):
        return [node.kind]
    name = node.model + (f" · version {node.version}" if node.version else "")
    if node.kind == "missing":
        return [name, "not there"]
    lines = [name, node.backend + (" · decoupled" if node.decoupled else "")]
    batching = f"batches ≤ {node.max_batch_size}" + (f", {node.batching}" if node.batching else "")
    instances = f"{node.instances} instance{'s' * (node.instances > 1)}" if node.instances else ""
    lines.append(" · ".join(filter(None, (batching if node.max_batch_size else node.batching, instances))))
    if node.times is not None:
        times = node.times
        spent = times.queue_seconds + times.compute_seconds
        share = f"{100 * times.share:.0f} % of the time · " if times.share else ""
        lines.append(f"{share}{times.requests} request{'s' * (times.requests != 1)}")
        if spent:
            queued = 100 * times.queue_seconds / spent
            lines.append(f"queue {queued:.0f} % · compute {100 - queued:.0f} %")
    return [line for line in lines if line]


def cluster_title(cluster: GraphCluster) -> str:
    return f"{cluster.model} · version {cluster.version}" + (" · decoupled" if cluster.decoupled else "")


def tensor_text(tensor: EdgeTensor) -> str:
    return f"{tensor.name}: {tensor.datatype} [{', '.join(map(str, tensor.shape))}]"


def to_mermaid(graph: ModelGraph) -> str:
    """A flowchart; names are escaped, whatever they are."""
    lines = ["flowchart LR"]

    def write(cluster: str, indent: str) -> None:
        for node in graph.nodes:
            if node.cluster == cluster:
                opened, closed = ("([", "])") if node.kind in ("request", "response") else ("[", "]")
                lines.append(f'{indent}{node.id}{opened}"{_label(node_lines(node))}"{closed}')
        for inner in graph.clusters:
            if inner.parent == cluster:
                lines.append(f'{indent}subgraph {inner.id}["{_label([cluster_title(inner)])}"]')
                write(inner.id, indent + "  ")
                lines.append(f"{indent}end")

    write("", "  ")
    for edge in graph.edges:
        texts = [tensor_text(tensor) for tensor in edge.tensors]
        arrow = f'-->|"{_label(texts)}"|' if texts else "-.->"
        lines.append(f"  {edge.source} {arrow} {edge.target}")
    return "\n".join(lines) + "\n"


def _label(lines: list[str]) -> str:
    return "<br/>".join(_SPECIAL.sub(lambda match: f"#{ord(match[0])};", line) for line in lines)


_CHARACTER, _LINE, _PADDING, _GAP, _TITLE = 6.6, 16.0, 12.0, 28.0, 24.0
"""Pixels of the drawing: a character's width, a line's height, and the room around things."""

_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#222}.name{font-weight:600}.edge{fill:none;stroke:#667}"
    ".label{paint-order:stroke;stroke:#fff;stroke-width:4px;fill:#446}.cluster{fill:#f6f7fb;stroke:#99a}"
    ".node{fill:#fff;stroke:#556}.heat{fill:hsl(30 90% 60%)}"
)
_ARROW = (
    '<marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#667"/></marker>'
)


@dataclass
class _Box:
    """A node, or a cluster with the boxes in it, at its place."""

    id: str
    lines: Sequence[str]
    share: float | None = None
    inner: list["_Box"] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0

    def move(self, x: float, y: float) -> None:
        self.x, self.y = self.x + x, self.y + y
        for box in self.inner:
            box.move(x, y)


def to_svg(graph: ModelGraph) -> str:
    """A picture that stands for itself: no script, no font, nothing from elsewhere."""
    top = _Box("", ())
    _arrange(top, graph)
    width, height = top.width + 2 * _PADDING, top.height + 2 * _PADDING
    top.move(_PADDING, _PADDING)
    drawn: list[str] = []
    for box in top.inner:
        _draw_box(box, drawn)
    places = {box.id: box for box in _leaves(top)}
    for edge in graph.edges:
        _draw_edge(edge, places, drawn)
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style><defs>{_ARROW}</defs>'
    return "\n".join([head, *drawn, "</svg>", ""])


def _arrange(cluster: _Box, graph: ModelGraph) -> None:
    """Place all that stands in a cluster, from its left upper corner, and find its size."""
    cluster.inner = [
        _Box(node.id, node_lines(node), None if node.times is None else node.times.share)
        for node in graph.nodes
        if node.cluster == cluster.id
    ]
    for inner in graph.clusters:
        if inner.parent == cluster.id:
            box = _Box(inner.id, [cluster_title(inner)])
            _arrange(box, graph)
            cluster.inner.append(box)
    for box in cluster.inner:
        if not box.inner:
            box.width = max(len(line) for line in box.lines) * _CHARACTER + 2 * _PADDING
            box.height = len(box.lines) * _LINE + _PADDING
    holders = {leaf.id: box for box in cluster.inner for leaf in _leaves(box)}
    edges = [edge for edge in graph.edges if edge.source in holders and edge.target in holders]
    links = [(holders[edge.source].id, holders[edge.target].id) for edge in edges]
    margin, top = (_PADDING, _TITLE) if cluster.id else (0.0, 0.0)
    width, height = max(map(len, cluster.lines), default=0) * _CHARACTER, 0.0
    for component in _components(cluster.inner, links):
        here = {box.id for box in component}
        label = _longest_label([edge for edge in edges if holders[edge.source].id in here])
        size = _place(component, _layers(sorted(here), [link for link in links if link[0] in here]), label)
        for box in component:
            box.move(margin, top + height)
        width, height = max(width, size[0]), height + size[1] + _GAP
    cluster.width, cluster.height = width + 2 * margin, top + height - _GAP + margin


def _components(boxes: Sequence[_Box], links: Sequence[tuple[str, str]]) -> list[list[_Box]]:
    """The boxes that hang together, each in its order."""
    groups = {box.id: {box.id} for box in boxes}
    for source, target in links:
        if groups[source] is not groups[target]:
            groups[source] |= groups[target]
            groups.update(dict.fromkeys(groups[target], groups[source]))
    distinct = {id(group): group for group in groups.values()}
    return [[box for box in boxes if box.id in group] for group in distinct.values()]


def _layers(ids: Sequence[str], links: Sequence[tuple[str, str]]) -> Mapping[str, int]:
    """The layer of each box: behind the boxes before it; in a circle, somewhere."""
    layers = dict.fromkeys(ids, 0)
    for _ in ids:
        moved = False
        for source, target in links:
            if source != target and layers[target] <= layers[source] < len(ids):
                layers[target], moved = layers[source] + 1, True
        if not moved:
            break
    return layers


def _place(boxes: Sequence[_Box], layers: Mapping[str, int], label: float) -> tuple[float, float]:
    """Put the layers beside each other, with room for labels between, and centre the boxes of each; width, height."""
    columns = [[box for box in boxes if layers[box.id] == layer] for layer in sorted(set(layers.values()))]
    heights = [sum(box.height for box in column) + _GAP * (len(column) - 1) for column in columns]
    x, tallest = 0.0, max(heights)
    for column, height in zip(columns, heights, strict=True):
        y = (tallest - height) / 2
        for box in column:
            box.move(x, y)
            y += box.height + _GAP
        x += max(box.width for box in column) + label + 2 * _GAP
    return x - label - 2 * _GAP, tallest


def _longest_label(edges: Sequence[GraphEdge]) -> float:
    return _CHARACTER * max((len(tensor_text(tensor)) for edge in edges for tensor in edge.tensors), default=0)


def _leaves(box: _Box) -> list[_Box]:
    return [leaf for inner in box.inner for leaf in _leaves(inner)] if box.inner else [box]


def _draw_box(box: _Box, drawn: list[str]) -> None:
    place = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="6"'
    if box.inner:
        drawn.append(f'<rect class="cluster" {place}/>')
        drawn.append(_text(box.x + _PADDING, box.y + _LINE, box.lines[0], "name"))
        for inner in box.inner:
            _draw_box(inner, drawn)
        return
    drawn.append(f'<rect class="node" {place}/>')
    if box.share:
        drawn.append(f'<rect class="heat" {place} fill-opacity="{box.share:.2f}"/>')
    for number, line in enumerate(box.lines):
        y = box.y + _LINE * (number + 1)
        drawn.append(_text(box.x + _PADDING, y, line, "name" if number == 0 else ""))


def _draw_edge(edge: GraphEdge, places: Mapping[str, _Box], drawn: list[str]) -> None:
    source, target = places[edge.source], places[edge.target]
    x, y = source.x + source.width, source.y + source.height / 2
    end_x, end_y = target.x, target.y + target.height / 2
    bend = max((end_x - x) / 2, _GAP)
    dashes = "" if edge.tensors else ' stroke-dasharray="4 3"'
    path = f"M{x:.1f} {y:.1f}C{x + bend:.1f} {y:.1f} {end_x - bend:.1f} {end_y:.1f} {end_x:.1f} {end_y:.1f}"
    drawn.append(f'<path class="edge" marker-end="url(#arrow)"{dashes} d="{path}"/>')
    lines = [tensor_text(tensor) for tensor in edge.tensors]
    top = (y + end_y) / 2 - _LINE * (len(lines) - 1) / 2 - 4
    for number, line in enumerate(lines):
        drawn.append(_text((x + end_x) / 2 - len(line) * _CHARACTER / 2, top + _LINE * number, line, "label"))


def _text(x: float, y: float, text: str, kind: str) -> str:
    printable = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(printable)}</text>'


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
