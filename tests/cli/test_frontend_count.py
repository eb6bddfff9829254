"""How many processes `--frontends` comes to."""

import pytest

from charonia.cli.app import app
from charonia.cli.frontend_count import VARIABLE, count_frontends, most_frontends
from charonia.core.errors import InvalidArgument


@pytest.mark.parametrize(
    ("cores", "gpus", "most"),
    [(1, 0, 1), (4, 0, 1), (4, 2, 1), (5, 0, 1), (7, 1, 2), (8, 0, 2), (8, 1, 2), (12, 1, 3), (16, 0, 4), (128, 8, 4)],
)
def test_auto_goes_by_cores_and_gpus(cores: int, gpus: int, most: int) -> None:
    assert most_frontends(cores, gpus) == most


def test_a_number_is_what_it_says_and_auto_begins_with_one() -> None:
    machine = {VARIABLE: "cores=16 busy=0.1 seconds=0.5"}
    three, auto = count_frontends(3, machine), count_frontends("auto", machine)
    assert (three.most, three.grows, three.auto) == (3, False, 4)
    assert (auto.most, auto.grows, auto.limit) == (4, True, (0.1, 0.5))
    small = count_frontends("auto", {VARIABLE: "cores=4"})
    assert (small.most, small.grows, small.limit) == (1, False, (0.7, 5.0))


@pytest.mark.parametrize("text", ["8", "cores=many", "kernels=2"])
def test_a_variable_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{VARIABLE} must be as"):
        count_frontends("auto", {VARIABLE: text})


@pytest.mark.parametrize(
    ("words", "expected"), [([], "auto"), (["--frontends", "AUTO"], "auto"), (["--frontends=7"], 7)]
)
def test_the_flag_is_a_number_or_auto(words: list[str], expected: object) -> None:
    _, bound, _ = app.parse_args(["serve", "model", *words], exit_on_error=False, print_error=False)
    bound.apply_defaults()
    assert bound.arguments["options"].server.frontends == expected


@pytest.mark.parametrize("word", ["0", "65", "many"])
def test_other_words_are_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="--frontends"):
        app.parse_args(["serve", "model", "--frontends", word], exit_on_error=False, print_error=False)
