"""A picture of a step: whose time it was, and that it can be looked at."""

from pathlib import Path
from xml.etree import ElementTree

import torch

from charonia.bench.step_trace import HOST, LANES, TracedWork, lane_microseconds, trace_step, write_picture


def test_what_is_computed_is_traced() -> None:
    left = torch.ones(50, 50)
    spans = trace_step(lambda: torch.nn.functional.silu(left @ left), torch.device("cpu"))
    assert {span.lane for span in spans} <= {*LANES}
    assert {"aten::mm", "aten::silu"} <= {span.name for span in spans}
    assert spans[0].start == 0.0
    assert [span.start for span in spans] == sorted(span.start for span in spans)


def test_a_picture_has_each_span_in_its_lane(tmp_path: Path) -> None:
    spans = [
        TracedWork("attend<float>", "attention", 0, 10),
        TracedWork("gemm & more", "products", 10, 30),
        TracedWork("launch", HOST, 2, 1),
    ]
    write_picture(spans, "a step", tmp_path / "step.svg")
    drawn = ElementTree.parse(tmp_path / "step.svg").getroot()
    titles = [element.text for element in drawn.iter() if element.tag.endswith("title")]
    assert titles == ["attend<float>: 10.0 µs", "gemm & more: 30.0 µs", "launch: 1.0 µs"]
    assert list(lane_microseconds(spans).items()) == [("products", 30), ("attention", 10), (HOST, 1)]
