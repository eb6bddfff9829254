"""The graph of a model: the models that answer its requests, and the tensors between them.

It is made of configs alone, as /config shows them. The steps of an ensemble stand in a cluster, also within another's.
What a model's code asks is known from its config's parameter `models`, by name and without tensors.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from ...core.model import DeclaredModels, RawConfig

_PIPELINE = "pipeline"


class NodeTimes(msgspec.Struct, frozen=True):
    """Where the time of a model's successful requests went since it was loaded, of all clients' together: their number,
    seconds in all, waiting and computing; and the share of this step of all the graph's steps' time."""

    requests: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    share: float = 0.0


def node_times(statistics: Mapping[str, Mapping[str, int]]) -> NodeTimes:
    """The times of a model, of the `inference_stats` of v2's statistics extension."""
    seconds = {name: duration["ns"] / 1e9 for name, duration in statistics.items()}
    compute = seconds["compute_input"] + seconds["compute_infer"] + seconds["compute_output"]
    return NodeTimes(statistics["success"]["count"], seconds["success"], seconds["queue"], compute)


class GraphModel(msgspec.Struct, frozen=True):
    """A version of a model to put into a graph."""

    version: str
    config: RawConfig
    times: NodeTimes | None = None


ModelFinder: TypeAlias = Callable[[str, str], GraphModel | None]
"""The model of a name and version, the latest if that is empty; None if it is not there."""


class EdgeTensor(msgspec.Struct, frozen=True):
    """`name`: of the ensemble's tensor. `shape`: with the dimension of the batch."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class GraphNode(msgspec.Struct, frozen=True):
    """A model, or an end of the graph: `kind` is "model", "missing", "request" or "response". `batching`: "dynamic",
    "sequence" or none. `cluster`: the id of the cluster that it stands in, empty for none."""

    id: str
    kind: str
    model: str = ""
    version: str = ""
    backend: str = ""
    max_batch_size: int = 0
    batching: str = ""
    instances: int = 0
    decoupled: bool = False
    cluster: str = ""
    times: NodeTimes | None = None


class GraphEdge(msgspec.Struct, frozen=True):
    """From node to node, with the tensors that pass; none where code asks a model."""

    source: str
    target: str
    tensors: tuple[EdgeTensor, ...] = ()


class GraphCluster(msgspec.Struct, frozen=True):
    """The steps of an ensemble; `parent`: the cluster of the ensemble that it is a step of, empty for none."""

    id: str
    model: str
    version: str
    decoupled: bool = False
    parent: str = ""


class ModelGraph(msgspec.Struct, frozen=True):
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    clusters: tuple[GraphCluster, ...]


class _Origin(msgspec.Struct, frozen=True):
    """The node that a tensor comes from."""

    node: str
    tensor: EdgeTensor


def graph_of_models(names: Iterable[str], find: ModelFinder, version: str = "") -> ModelGraph:
    """The graphs of these models side by side."""
    graph = _Builder(find)
    for name in names:
        graph.add_root(name, version)
    return graph.built()


def roots_of(configs: Mapping[str, RawConfig]) -> list[str]:
    """The models that no other one asks, by name; those that ask each other in a circle too."""
    needed = {name: models_asked(config) - {name} for name, config in configs.items()}
    roots = sorted(set(configs).difference(*needed.values()))
    reached, left = set[str](), list(roots)
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += needed.get(name, ())
    return roots + sorted(set(configs) - reached)


def models_asked(config: RawConfig) -> frozenset[str]:
    steps = config.get("ensemble_scheduling", {}).get("step", ())
    parameters = config.get("parameters", {})
    declared = DeclaredModels.of({key: value.get("string_value", "") for key, value in parameters.items()})
    return declared.names | {step["model_name"] for step in steps}


class _Builder:
    def __init__(self, find: ModelFinder) -> None:
        self._find = find
        self._nodes: list[GraphNode] = []
        self._clusters: list[GraphCluster] = []
        self._edges: dict[tuple[str, str], dict[str, EdgeTensor]] = {}

    def built(self) -> ModelGraph:
        """A model whose code asks others has no share of its own: its time is theirs too. One that
        is drawn in several places has one."""
        askers = {source for (source, _), tensors in self._edges.items() if not tensors}
        asking = {node.model for node in self._nodes if node.id in askers}
        timed = {
            (node.model, node.version): node.times.seconds
            for node in self._nodes
            if node.times is not None and node.model not in asking
        }
        total = sum(timed.values())
        nodes = []
        for node in self._nodes:
            times = node.times
            if times is not None and total and node.model not in asking:
                times = msgspec.structs.replace(times, share=times.seconds / total)
            nodes.append(msgspec.structs.replace(node, times=times))
        edges = [GraphEdge(*ends, tuple(tensors.values())) for ends, tensors in self._edges.items()]
        return ModelGraph(tuple(nodes), tuple(edges), tuple(self._clusters))

    def add_root(self, name: str, version: str) -> None:
        model = self._find(name, version)
        if model is None or not _steps(model.config):
            self._add(name, version, {}, "", ())
            return
        request = self._add_node(kind="request")
        origins = {tensor["name"]: _Origin(request, _tensor(model.config, tensor)) for tensor in model.config["input"]}
        outputs = self._add(name, version, origins, "", ())
        response = self._add_node(kind="response")
        for origin in outputs.values():
            self._connect(origin, response)

    def _add(
        self, name: str, version: str, origins: Mapping[str, _Origin], cluster: str, path: tuple[str, ...]
    ) -> Mapping[str, _Origin]:
        """Add a model that gets these inputs, by its own names; returns its outputs. `path`: what it is a step of."""
        model = self._find(name, version)
        if model is not None and _steps(model.config) and name not in path:
            return self._add_ensemble(name, model, origins, cluster, path)
        node = self._add_model(name, version, model, cluster)
        for origin in origins.values():
            self._connect(origin, node)
        if model is None:
            return {}
        if name not in path and not _steps(model.config):
            for needed in self._asked(model.config):
                self._connect_asked(node, needed, cluster, (*path, name))
        return {
            tensor["name"]: _Origin(node, _tensor(model.config, tensor)) for tensor in model.config.get("output", ())
        }

    def _connect_asked(self, node: str, name: str, cluster: str, path: tuple[str, ...]) -> None:
        model = self._find(name, "")
        target = self._add_model(name, "", model, cluster)
        self._edges.setdefault((node, target), {})
        if model is not None and name not in path and not _steps(model.config):
            for needed in self._asked(model.config):
                self._connect_asked(target, needed, cluster, (*path, name))

    def _asked(self, config: RawConfig) -> list[str]:
        """The models that code says it asks; only of a pipeline does the parameter mean that in any case."""
        sure = config.get("backend") == _PIPELINE
        return [name for name in sorted(models_asked(config)) if sure or self._find(name, "") is not None]

    def _add_ensemble(
        self, name: str, model: GraphModel, origins: Mapping[str, _Origin], parent: str, path: tuple[str, ...]
    ) -> Mapping[str, _Origin]:
        cluster = f"c{len(self._clusters)}"
        self._clusters.append(GraphCluster(cluster, name, model.version, _is_decoupled(model.config), parent))
        known, left = dict(origins), list(_steps(model.config))
        made = {tensor for step in left for tensor in step["output_map"].values()}
        while left:
            ready = [step for step in left if not (set(step["input_map"].values()) & made) - set(known)]
            for step in ready or left:  # a circle is drawn as far as it goes
                inputs = {key: known[tensor] for key, tensor in step["input_map"].items() if tensor in known}
                version = int(step.get("model_version", -1))
                version_name = str(version) if version > 0 else ""
                outputs = self._add(step["model_name"], version_name, inputs, cluster, (*path, name))
                for key, tensor in step["output_map"].items():
                    if key in outputs:
                        renamed = msgspec.structs.replace(outputs[key].tensor, name=tensor)
                        known[tensor] = _Origin(outputs[key].node, renamed)
                    made.discard(tensor)
            left = [step for step in left if step not in (ready or left)]
        return {tensor["name"]: known[tensor["name"]] for tensor in model.config["output"] if tensor["name"] in known}

    def _add_model(self, name: str, version: str, model: GraphModel | None, cluster: str) -> str:
        if model is None:
            return self._add_node(kind="missing", model=name, version=version, cluster=cluster)
        config = model.config
        return self._add_node(
            kind="model",
            model=name,
            version=model.version,
            backend=config.get("backend") or config.get("platform", ""),
            max_batch_size=config.get("max_batch_size", 0),
            batching=next((kind for kind in ("dynamic", "sequence") if f"{kind}_batching" in config), ""),
            instances=sum(group.get("count", 1) for group in config.get("instance_group", ())),
            decoupled=_is_decoupled(config),
            cluster=cluster,
            times=model.times,
        )

    def _add_node(self, **fields: Any) -> str:
        node = GraphNode(id=f"n{len(self._nodes)}", **fields)
        self._nodes.append(node)
        return node.id

    def _connect(self, origin: _Origin, target: str) -> None:
        tensors = self._edges.setdefault((origin.node, target), {})
        tensors[origin.tensor.name] = origin.tensor


def _steps(config: RawConfig) -> list[RawConfig]:
    steps: list[RawConfig] = config.get("ensemble_scheduling", {}).get("step", [])
    return steps


def _tensor(config: RawConfig, spec: RawConfig) -> EdgeTensor:
    datatype = spec["data_type"].removeprefix("TYPE_")
    batch = (-1,) if config.get("max_batch_size", 0) > 0 else ()
    return EdgeTensor(spec["name"], "BYTES" if datatype == "STRING" else datatype, (*batch, *spec["dims"]))


def _is_decoupled(config: RawConfig) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled"))
