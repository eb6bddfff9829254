"""Pictures of lines."""

from xml.etree import ElementTree

import pytest

from charonia.extras.optimizer.line_chart import ChartLine, LineChart, draw_chart, write_page

SVG = "{http://www.w3.org/2000/svg}"


def parts(chart: LineChart, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(draw_chart(chart)).iter(SVG + name))


def test_a_line_goes_through_its_points_and_more_is_higher() -> None:
    chart = LineChart("t", "x", "y", [ChartLine("a", [(1, 0.0), (2, 5.0), (4, 10.0)], dots=True)])
    [line] = parts(chart, "polyline")
    places = [tuple(map(float, each.split(","))) for each in line.attrib["points"].split()]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    assert places[1][0] - places[0][0] == pytest.approx((places[2][0] - places[0][0]) / 3, abs=0.2)
    assert len(parts(chart, "circle")) == 3


def test_a_logarithmic_axis_gives_each_decade_as_much_room() -> None:
    chart = LineChart("t", "x", "y", [ChartLine("a", [(1, 0.0), (10, 0.5), (100, 1.0)])], log_x=True)
    [line] = parts(chart, "polyline")
    first, second, third = (float(each.split(",")[0]) for each in line.attrib["points"].split())
    assert second - first == pytest.approx(third - second, abs=0.2)
    assert {"1", "10", "100"} <= {part.text for part in parts(chart, "text")}


def test_a_logarithmic_height_shows_what_is_small_beside_what_is_large() -> None:
    lines = [ChartLine("a", [(1, 400.0), (2, 0.5)]), ChartLine("b", [(1, 2.0), (2, 0.01)])]
    chart = LineChart("t", "x", "y", lines, log_y=True)
    heights = [
        [float(each.split(",")[1]) for each in line.attrib["points"].split()] for line in parts(chart, "polyline")
    ]
    assert heights[0][0] < heights[1][0] < heights[0][1] < heights[1][1]


def test_lines_of_text_stand_below_the_picture() -> None:
    chart = LineChart("t", "x", "y", [ChartLine("a", [(1, 1.0)])])
    drawn = ElementTree.fromstring(draw_chart(chart, "one  1\n<two>\n"))
    bottom = float(ElementTree.fromstring(draw_chart(chart)).attrib["viewBox"].split()[3])
    written = [each for each in drawn.iter(SVG + "text") if float(each.attrib["y"]) > bottom]
    assert [each.text for each in written] == ["one  1", "<two>"]
    assert float(drawn.attrib["viewBox"].split()[3]) > max(float(each.attrib["y"]) for each in written)
    assert drawn.find(SVG + "title").text == "t"  # type: ignore[union-attr]


def test_text_is_text() -> None:
    chart = LineChart("<b> & 'c'", "x", "y", [ChartLine("</svg>", [(1, 1.0)])])
    assert {"<b> & 'c'", "</svg>"} <= {part.text for part in parts(chart, "text")}
    page = write_page(chart, "a < b")
    assert "a &lt; b" in page
    assert "<b>" not in page


@pytest.mark.parametrize("points", [[(1, 0.0)], [(0, 0.0), (0, 0.0)], [(5, 3.0), (5, 4.0)]])
def test_a_single_place_is_drawn_too(points: list[tuple[float, float]]) -> None:
    assert len(parts(LineChart("t", "x", "y", [ChartLine("a", points)]), "polyline")) == 1
