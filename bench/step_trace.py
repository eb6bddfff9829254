"""A picture of a step: what the device computes and what the host launches, each kind of work in a lane of its own."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

LANES = {
    "attention": re.compile(r"attend|attention|flash|_(decode|chunk|combine)_kernel", re.IGNORECASE),
    "products": re.compile(r"gemm|gemv|matmul|nvjet|cutlass|cublas|splitk|::mm|linear|dot_kernel", re.IGNORECASE),
    "between": re.compile(r"norm|rope|rotat|gate|silu|cache|_write_kernel", re.IGNORECASE),
    "other kernels": re.compile(""),
}
"""The kinds of kernels, by their names; the first that fits."""
HOST = "host"
_LAUNCH = re.compile(r"cu.*(Launch|Memcpy|Memset)")
"""The host's calls that give the device work: the others wait, or ask."""
_COLOURS = {
    "attention": "#d1495b",
    "products": "#00798c",
    "between": "#edae49",
    "other kernels": "#8d96a3",
    HOST: "#30638e",
}
_WIDTH, _LEFT, _LANE, _TOP = 1400, 120, 36, 40


class TracedWork(NamedTuple):
    """A kernel, or a launch on the host; in microseconds from the first."""

    name: str
    lane: str
    start: float
    duration: float


def trace_step(compute: Callable[[], object], device: torch.device) -> list[TracedWork]:
    """The spans of one call, after one that is not traced. On a CPU the operations are what would be kernels."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    compute()
    with profile(activities=activities) as traced:
        compute()
        if on_gpu:
            torch.cuda.synchronize()
    events: Any = traced.events()
    spans = []
    for event in events:
        is_kernel = event.device_type.name == ("CUDA" if on_gpu else "CPU")
        if is_kernel or (on_gpu and _LAUNCH.match(event.name)):
            lane = next(name for name, kind in LANES.items() if kind.search(event.name)) if is_kernel else HOST
            spans.append(TracedWork(event.name, lane, event.time_range.start, event.time_range.elapsed_us()))
    first = min((span.start for span in spans), default=0.0)
    return sorted((span._replace(start=span.start - first) for span in spans), key=lambda span: span.start)


def lane_microseconds(spans: Sequence[TracedWork]) -> dict[str, float]:
    """How long each lane was at work, the longest first."""
    took: dict[str, float] = defaultdict(float)
    for span in spans:
        took[span.lane] += span.duration
    return dict(sorted(took.items(), key=lambda entry: -entry[1]))


def write_picture(spans: Sequence[TracedWork], title: str, file: Path) -> None:
    """An SVG; a span's name and microseconds show where the pointer rests on it."""
    end = max((span.start + span.duration for span in spans), default=1.0)
    scale = (_WIDTH - _LEFT - 20) / end
    lanes = [lane for lane in (*LANES, HOST) if any(span.lane == lane for span in spans)]
    bottom = _TOP + _LANE * len(lanes)
    took = lane_microseconds(spans)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 40}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}: {end:,.0f} µs</text>',
    ]
    for number, lane in enumerate(lanes):
        y = _TOP + _LANE * number
        drawn.append(f'<text x="10" y="{y + 15}" font-size="12">{lane}</text>')
        drawn.append(f'<text x="10" y="{y + 28}" font-size="10" fill="#555">{took[lane]:,.0f} µs</text>')
        for span in spans:
            if span.lane == lane:
                x, width = _LEFT + span.start * scale, max(span.duration * scale, 0.3)
                shape = f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE - 6}" fill="{_COLOURS[lane]}">'
                drawn.append(f"{shape}<title>{escape(span.name)}: {span.duration:,.1f} µs</title></rect>")
    for tenth in range(11):
        x = _LEFT + (_WIDTH - _LEFT - 20) * tenth / 10
        drawn.append(
            f'<text x="{x:.0f}" y="{bottom + 20}" font-size="10" text-anchor="middle">{end * tenth / 10:,.0f}</text>'
        )
    file.write_text("\n".join((*drawn, "</svg>", "")))
