"""What a graph says in words, and as Mermaid (https://mermaid.js.org/syntax/flowchart.html)."""

import re

from .model_graph import EdgeTensor, GraphCluster, GraphNode, ModelGraph

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
        for each in graph.clusters:
            if each.parent == cluster:
                lines.append(f'{indent}subgraph {each.id}["{_label([cluster_title(each)])}"]')
                write(each.id, indent + "  ")
                lines.append(f"{indent}end")

    write("", "  ")
    for edge in graph.edges:
        texts = [tensor_text(tensor) for tensor in edge.tensors]
        arrow = f'-->|"{_label(texts)}"|' if texts else "-.->"
        lines.append(f"  {edge.source} {arrow} {edge.target}")
    return "\n".join(lines) + "\n"


def _label(lines: list[str]) -> str:
    return "<br/>".join(_SPECIAL.sub(lambda found: f"#{ord(found[0])};", line) for line in lines)
