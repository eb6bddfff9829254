"""The report and the conclusion, of trials made by hand."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from charonia.bench.load.figures import Spread
from charonia.core.errors import InvalidArgument
from charonia.extras.optimizer.analysis import shown_command
from charonia.extras.optimizer.conclusion import Conclusion, conclude, conclude_levels
from charonia.extras.optimizer.parameters import ClosedLoop, equivalence, parse_sweeps
from charonia.extras.optimizer.report import ReportOrigin, render_report, write_report
from charonia.extras.optimizer.search_goal import (
    Configuration,
    ConfigurationTrial,
    LevelFigures,
    SearchGoal,
    parse_goal,
)
from charonia.extras.optimizer.search_space import SearchSpace, TunedParameter
from charonia.extras.optimizer.svg_plots import PlotAxis, PlotPoint, draw_points
from charonia.extras.optimizer.tuned_models import TunedModels

Opened = Callable[[str], TunedModels]


def trial(configuration: Configuration, *levels: tuple[float, float], seconds: float = 1.0) -> ConfigurationTrial:
    """With (throughput, seconds of a request) at levels 1, 2, ..."""
    figures = tuple(
        LevelFigures(level=f"concurrency {number}", requests=5, throughput=rate, e2e=Spread.of([time]), memory=1e8)
        for number, (rate, time) in enumerate(levels, 1)
    )
    return ConfigurationTrial(configuration=configuration, seconds=seconds, setup=0.5, loading=seconds, levels=figures)


def failed(configuration: Configuration) -> ConfigurationTrial:
    return ConfigurationTrial(configuration=configuration, seconds=1.0, setup=0.5, failure="no <room> for it\nmore")


def concluded(opened: Opened, trials: Sequence[ConfigurationTrial], *constraints: str, ended: str = "") -> Conclusion:
    models = opened("onnx")
    parameters = parse_sweeps(["instances=1,2,4", "execution_mode=0,1"], models)
    return conclude(
        models, SearchSpace(parameters), parse_goal("throughput", constraints, streams=False), trials, ended
    )


def said(conclusion: Conclusion, width: int = 160) -> str:
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as captured:
        conclusion.print_to(console)
    return captured.get()


ORIGIN = ReportOrigin("charonia analyze ./models --sweep 'instances=1,2'", "2026-01-02 03:04 +0000", "a machine")


FINAL = [
    trial((1, 0), (90.0, 0.1)),
    trial((2, 0), (200.0, 0.1)),
    *(trial((2, 0), (rate, 0.1), seconds=2.0) for rate in (190.0, 200.0, 210.0)),
    *(trial((4, 0), (rate, 0.1), seconds=2.0) for rate in (180.0, 185.0, 195.0)),
    *(trial((4, 1), (rate, 0.1), seconds=2.0) for rate in (100.0, 110.0, 120.0)),
    failed((1, 1)),
]


def test_the_best_is_told_with_what_it_is_not_told_apart_from(opened: Opened) -> None:
    text = said(concluded(opened, FINAL))
    assert "best: instances=2 execution_mode=0: throughput 200/s (190/s to 210/s) under concurrency 1" in text
    base = "2.22 times as good as instances=1 execution_mode=0 (measured once, for 1 s), which holds now or was tried"
    assert base in text
    assert "not told apart from instances=4 execution_mode=0, with 185/s (180/s to 195/s)" in text
    assert "told apart from instances=4 execution_mode=1, with 110/s (100/s to 120/s)" in text
    assert "1 of the configurations failed, the first with: no <room> for it" in text
    assert "5 of 6 configurations were measured" in text
    assert "onnx/config.pbtxt:" in text
    assert "instance_group {\n  count: 2\n}" in text


def test_a_narrow_terminal_gets_whole_figures_and_fewer_of_them(opened: Opened) -> None:
    conclusion = concluded(opened, FINAL)
    for width, parameters, last in ((160, "execution_mode", "memory"), (80, "execution_mode", "e2e_p50"), (50, "", "")):
        table = [line for line in said(conclusion, width).splitlines() if line[:1] in "┃│"]
        assert max(map(len, table)) <= width
        assert parameters in table[0]
        assert last in table[0]
        assert not any("…" in line for line in table)
        assert any("200/s" in line for line in table)


def test_the_table_has_the_median_as_the_sentences_have(opened: Opened) -> None:
    two = [trial((2, 0), (rate, 0.1), seconds=2.0) for rate in (190.0, 210.0)]
    text = said(concluded(opened, two))
    assert "throughput 200/s (190/s to 210/s)" in text
    assert "│ 200/s " in text


def test_what_the_load_cannot_tell_apart_stays_as_it_is_unless_memory_counts(opened: Opened) -> None:
    models = opened("onnx")  # whose largest batch is 8, and which batches nothing
    parameters = parse_sweeps(["max_batch_size=2,4,8", "instances=1,2"], models)
    space = SearchSpace(parameters, equivalence(parameters, models, ClosedLoop(4)))
    goals = [parse_goal("throughput", more, streams=False) for more in ((), ("memory=1GiB",))]
    plain, bounded = (conclude(models, space, goal, [trial((2, 2), (90.0, 0.1))], "") for goal in goals)
    assert "max_batch_size may stay 8: this load tells no 2 from it" in plain.sentences
    assert "max_batch_size: 8" in plain.texts[0].text
    assert "count: 2" in plain.texts[0].text
    assert "max_batch_size: 2" in bounded.texts[0].text


def test_bounds_that_nothing_keeps_are_told_with_the_nearest(opened: Opened) -> None:
    trials = [trial((1, 0), (90.0, 0.3)), trial((2, 0), (80.0, 0.2))]
    conclusion = concluded(opened, trials, "e2e_p99=100ms", ended="the budget ended it")
    text = said(conclusion)
    assert "no configuration that was measured keeps the constraints (e2e_p99 at most 100.0 ms, failed at most" in text
    assert "the nearest: instances=2 execution_mode=0, with throughput 80.0/s under concurrency 1" in text
    assert "misses e2e_p99 at most 100.0 ms" in text
    assert "the budget ended it" in text
    assert conclusion.texts == []


def test_models_that_load_in_no_configuration_are_told(opened: Opened) -> None:
    conclusion = concluded(opened, [failed((1, 0)), failed((2, 0))])
    text = said(conclusion)
    assert "no configuration could be measured" in text
    assert "2 of the configurations failed, the first with: no <room> for it" in text
    assert "no &lt;room&gt; for it" in render_report(conclusion, ["concurrency 1"], ORIGIN)


def test_a_report_needs_no_network_and_no_script(opened: Opened, tmp_path: Path) -> None:
    trials = [trial((1, 0), (90.0, 0.1), (150.0, 0.2)), trial((2, 0), (80.0, 0.1), (170.0, 0.3)), *FINAL]
    write_report(
        tmp_path / "deep" / "report.html", concluded(opened, trials), ["concurrency 1", "concurrency 2"], ORIGIN
    )
    text = (tmp_path / "deep" / "report.html").read_text()
    assert "default-src 'none'" in text
    assert not re.findall(r"<script|https?://|url\(|@import|<link|<img|\bon\w+=", text)
    drawings = [ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    # Throughput against latency and memory, by each of two parameters, from level to level, and the turns.
    assert len(drawings) == 6
    for drawing in drawings:
        assert drawing.findall("circle")
        assert all(circle.find("title").text for circle in drawing.findall("circle"))  # type: ignore[union-attr]
        assert drawing.find("text[@class='title']").text == drawing.get("aria-label")  # type: ignore[union-attr]
    for told in (ORIGIN.ended, ORIGIN.machine, "charonia analyze ./models --sweep &#x27;instances=1,2&#x27;"):
        assert told in text
    legend = re.findall(r'<span class="(\w+)">', text)
    assert legend == ["best", "plain", "missed"]
    assert all(f"svg .{kind}" in text or kind == "plain" for kind in legend)
    assert text.count('<tr class="best">') == 1
    assert "instance_group {\n  count: 2\n}" in text


@pytest.mark.parametrize("key", [["--api-key", "secret"], ["--api-key=secret"]])
def test_the_command_of_a_report_has_no_key(key: list[str]) -> None:
    told = shown_command(["analyze", "--url", "http://a b", *key])
    assert told.startswith("charonia analyze --url 'http://a b' --api-key")
    assert "secret" not in told


def test_names_are_escaped() -> None:
    goal = SearchGoal()
    space = SearchSpace([TunedParameter(name="<b>", values=("<i>&",))])
    text = render_report(
        conclude_levels("<u>", space, goal, trial(("<i>&",), (5.0, 0.1))), ["<s>"], ReportOrigin("<u>", "", "")
    )
    assert not re.findall("<[bius]>", text)
    assert "&lt;i&gt;&amp;" in text


def test_levels_of_a_server_in_use_are_told_one_by_one() -> None:
    space = SearchSpace([TunedParameter(name="server", values=("http://localhost:8000",))])
    goal = parse_goal("throughput", ["e2e_p99=150ms"], streams=False)
    found = conclude_levels("m", space, goal, trial(("http://localhost:8000",), (50.0, 0.1), (90.0, 0.2)))
    one, two = found.sentences
    assert one.startswith("concurrency 1: throughput 50.0/s, e2e_p50 100.0 ms, e2e_p99 100.0 ms, memory 95 MiB")
    assert two.endswith("; misses e2e_p99 at most 150.0 ms")
    assert found.best is not None
    assert found.best.feasible


def test_a_report_that_cannot_be_written_is_an_error(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="cannot write the report to"):
        write_report(tmp_path / "file" / "report.html", concluded(opened, FINAL), [], ORIGIN)


def test_points_lie_within_the_axes_and_what_is_endless_is_left_out() -> None:
    points = [PlotPoint(0.0, 0.0, "none"), PlotPoint(90.0, 4e6, "most"), PlotPoint(1.0, float("inf"), "endless")]
    drawing = ElementTree.fromstring(draw_points("p", points, PlotAxis("x"), PlotAxis("y"), [points[:2]]))
    circles = [(float(each.get("cx", "")), float(each.get("cy", ""))) for each in drawing.findall("circle")]
    assert len(circles) == 4, "both points, and those of the line"
    assert all(60 < x < 450 and 10 < y < 240 for x, y in circles)
    assert circles[0][0] < circles[1][0]
    assert circles[0][1] > circles[1][1]
    assert ElementTree.fromstring(draw_points("p", [], PlotAxis("x"), PlotAxis("y"))).findall("circle") == []
