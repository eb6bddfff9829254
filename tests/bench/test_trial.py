"""Turns of contenders, and what is told of them."""

from charonia.bench.trial import median_of, ratio_of, take_turns


def test_contenders_alternate_and_are_told_by_medians_and_ratios_of_a_round() -> None:
    measured: list[tuple[str, int]] = []

    def contender(name: str, factor: int) -> float:
        measured.append((name, factor))
        return float(len(measured) * factor)

    lines: list[str] = []
    contenders = {"one": lambda number: contender("one", number + 1), "other": lambda number: contender("other", 10)}
    runs = take_turns(contenders, 3, lines.append, lambda run: f"{run:.0f}")
    assert [name for name, _ in measured] == ["one", "other"] * 3
    assert runs == {"one": [1, 6, 15], "other": [20, 40, 60]}
    assert lines == ["one: 1", "other: 20", "one: 6", "other: 40", "one: 15", "other: 60"]
    assert median_of(runs["one"], lambda run: run) == 6
    assert ratio_of(runs["other"], runs["one"], lambda run: run) == 40 / 6
