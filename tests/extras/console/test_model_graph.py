"""Graphs of models: what is in them, and that every form of them holds whatever a model is called."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import Any

import pytest

from charonia.extras.console.graph_formats import GRAPH_FORMATS, to_mermaid, to_svg
from charonia.extras.console.model_graph import (
    EdgeTensor,
    GraphEdge,
    GraphModel,
    ModelGraph,
    NodeTimes,
    graph_of_models,
    roots_of,
)

NASTY = """a"]; <script>`x` & 'b' #35; --> | ∎\x1b é"""


def config(*, inputs: str = "A", outputs: str = "B", batch: int = 0, **more: Any) -> dict[str, Any]:
    def tensors(names: str) -> list[dict[str, Any]]:
        return [{"name": each, "data_type": "TYPE_STRING", "dims": [1]} for each in names.split()]

    return {"backend": "x", "max_batch_size": batch, "input": tensors(inputs), "output": tensors(outputs), **more}


def ensemble(*steps: tuple[str, dict[str, str], dict[str, str]], **more: Any) -> dict[str, Any]:
    mapped = [
        {"model_name": name, "model_version": -1, "input_map": takes, "output_map": makes}
        for name, takes, makes in steps
    ]
    return config(platform="ensemble", ensemble_scheduling={"step": mapped}, **more) | {"backend": ""}


def asking(models: str, **more: Any) -> dict[str, Any]:
    return config(parameters={"models": {"string_value": models}}, **more)


MODELS = {
    "one": config(batch=8, dynamic_batching={}, instance_group=[{"count": 2}, {"count": 1}]),
    "stream": config(model_transaction_policy={"decoupled": True}),
    # As written the steps are not in the order in which they run.
    "chain": ensemble(("stream", {"A": "mid"}, {"B": "B"}), ("one", {"A": "A"}, {"B": "mid"})),
    "nest": ensemble(
        ("chain", {"A": "A"}, {"B": "x"}),
        ("gone", {"A": "x"}, {"B": "B"}),
        ("one", {"A": "x"}, {"B": "y"}),
    ),
    "glue": asking("one, chain?, self", sequence_batching={}),
    "self": asking("glue"),
    "apart": config(),
}  # fmt: skip


def graph(*names: str, models: Mapping[str, Any] = MODELS, times: Mapping[str, NodeTimes] = {}) -> ModelGraph:
    def find(name: str, version: str) -> GraphModel | None:
        return GraphModel("1", models[name], times.get(name)) if name in models else None

    return graph_of_models(names, find)


def wired(drawn: ModelGraph) -> list[tuple[str, str, list[str]]]:
    names = {node.id: node.model or node.kind for node in drawn.nodes}
    return [(names[edge.source], names[edge.target], [tensor.name for tensor in edge.tensors]) for edge in drawn.edges]


def test_a_model_of_its_own_is_one_node() -> None:
    drawn = graph("one")
    assert [(node.model, node.max_batch_size, node.batching, node.instances) for node in drawn.nodes] == [
        ("one", 8, "dynamic", 3)
    ]
    assert (drawn.edges, drawn.clusters) == ((), ())


def test_the_steps_of_ensembles_stand_in_clusters_within_clusters() -> None:
    drawn = graph("nest")
    assert wired(drawn) == [
        ("request", "one", ["A"]),
        ("one", "stream", ["mid"]),
        ("stream", "gone", ["x"]),
        ("stream", "one", ["x"]),
    ]
    [nest, chain] = drawn.clusters
    assert (nest.model, nest.parent, chain.model, chain.parent) == ("nest", "", "chain", nest.id)
    kinds = [(node.model, node.kind, node.cluster) for node in drawn.nodes if node.cluster]
    assert kinds == [
        ("one", "model", chain.id),
        ("stream", "model", chain.id),
        ("gone", "missing", nest.id),
        ("one", "model", nest.id),
    ]
    assert drawn.edges[0].tensors == (EdgeTensor("A", "BYTES", (1,)),)
    assert drawn.edges[1].tensors == (EdgeTensor("mid", "BYTES", (-1, 1)),)


def test_what_code_asks_is_there_without_tensors_and_circles_end() -> None:
    assert wired(graph("glue")) == [
        ("glue", "chain", []),
        ("glue", "one", []),
        ("glue", "self", []),
        ("self", "glue", []),
    ]


def test_a_parameter_of_another_meaning_names_no_models() -> None:
    models = {"python": asking("gone, one"), "glue": asking("gone") | {"backend": "pipeline"}, "one": MODELS["one"]}
    assert wired(graph("python", models=models)) == [("python", "one", [])]
    assert wired(graph("glue", models=models)) == [("glue", "gone", [])]


def test_circles_of_ensembles_and_of_steps_end() -> None:
    ring = {
        "ring": ensemble(("gnir", {"A": "A"}, {"B": "B"})),
        "gnir": ensemble(("ring", {"A": "A"}, {"B": "B"})),
        "knot": ensemble(("one", {"A": "x"}, {"B": "y"}), ("one", {"A": "y"}, {"B": "x"})),
        "one": MODELS["one"],
    }
    assert [node.model for node in graph("ring", models=ring).nodes if node.model] == ["ring"]
    assert wired(graph("knot", models=ring)) == [("one", "one", ["y"])]
    assert roots_of(ring) == ["knot", "gnir", "ring"]


def test_a_repository_is_drawn_from_what_nobody_else_asks() -> None:
    assert roots_of(MODELS) == ["apart", "nest", "glue", "self"]


def test_time_is_shared_between_steps_and_not_with_those_that_ask_them() -> None:
    times = {"one": NodeTimes(3, 1.0, 0.25, 0.75), "stream": NodeTimes(3, 3.0), "glue": NodeTimes(1, 9.0)}
    shares = {node.model: node.times.share for node in graph("chain", times=times).nodes if node.times}
    assert shares == {"one": 0.25, "stream": 0.75}
    twice = {node.model: node.times.share for node in graph("chain", "one", times=times).nodes if node.times}
    assert twice == shares
    drawn = graph("glue", times=times)
    assert {node.model: node.times.share for node in drawn.nodes if node.times} == {"glue": 0.0, "one": 1.0}
    text = to_mermaid(drawn)
    assert "100 % of the time · 3 requests<br/>queue 25 % · compute 75 %" in text
    assert "sequence<br/>1 request" in text
    assert 'fill-opacity="1.00"' in to_svg(drawn)


@pytest.mark.parametrize("form", GRAPH_FORMATS)
def test_no_name_breaks_out_of_a_form(form: str) -> None:
    tensors = [{"name": NASTY, "data_type": "TYPE_INT8", "dims": [2]}]
    steps = [("one", {NASTY: NASTY}, {NASTY: "mid"}), (NASTY, {NASTY: "mid"}, {NASTY: NASTY})]
    models = {
        NASTY: config(inputs="A", outputs="B"),
        "one": {**MODELS["one"], "output": tensors},
        "end": ensemble(*steps) | dict.fromkeys(("input", "output"), tensors),
    }
    written = GRAPH_FORMATS[form].write(graph("end", models=models))
    match form:
        case "json":
            assert json.loads(written)["nodes"][2]["model"] == NASTY
        case "svg":
            texts = [each.text for each in ElementTree.fromstring(written).iter("{http://www.w3.org/2000/svg}text")]
            assert f"{NASTY} · version 1".replace("\x1b", "\N{REPLACEMENT CHARACTER}") in texts
        case _:
            labels = re.findall(r'"([^"]*)"', written)
            assert not re.findall(r"[`|;&\x1b<>]", re.sub(r"#\d+;|<br/>|<|>", "", "".join(labels)))
            assert "#60;script#62;" in written
            assert written.count('"') % 2 == 0


def boxes(svg: str) -> list[tuple[str, float, float, float, float]]:
    found = re.findall(r'<rect class="(\w+)" x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"', svg)
    return [(kind, float(x), float(y), float(x) + float(w), float(y) + float(h)) for kind, x, y, w, h in found]


def test_boxes_of_a_picture_are_apart_or_within_each_other() -> None:
    svg = to_svg(graph(*roots_of(MODELS)))
    width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', svg)[0])
    drawn = boxes(svg)
    assert len(drawn) > 12
    for kind, left, top, right, bottom in drawn:
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        for other, x, y, end_x, end_y in drawn:
            apart = right < x or end_x < left or bottom < y or end_y < top
            within = x < left and right < end_x and y < top and bottom < end_y and other == "cluster"
            around = left < x and end_x < right and top < y and end_y < bottom and kind == "cluster"
            assert apart or within or around or (left, top) == (x, y)


def test_arrows_go_from_left_to_right() -> None:
    svg = to_svg(graph("nest"))
    for start, end in re.findall(r' d="M(\S+) .*C.* (\S+) \S+"', svg):
        assert float(start) < float(end)
    assert to_svg(ModelGraph((), (), ())).startswith("<svg")
    circle = graph("glue")
    assert to_svg(ModelGraph(circle.nodes, (*circle.edges, GraphEdge("n0", "n0")), ())).count("<path class") == 5
