"""Results that a later run goes on from."""

from pathlib import Path

import msgspec
import pytest

from charonia.core.errors import InvalidArgument
from charonia.extras.optimizer.results_file import AnalysisSubject, ResultsFile
from charonia.extras.optimizer.search_goal import ConfigurationTrial, LevelFigures

SUBJECT = AnalysisSubject(
    source="models", model="m", digest="d", load={"levels": ["8"]}, machine="2 cores", seconds=4.0
)


def trial(throughput: float, seconds: float = 1.0) -> ConfigurationTrial:
    level = LevelFigures(level="8", requests=3, throughput=throughput)
    return ConfigurationTrial(configuration=(1, "off"), seconds=seconds, setup=0.5, loading=1.0, levels=(level,))


def test_what_was_measured_is_there_once_for_each_time(tmp_path: Path) -> None:
    settings = {"batch": 1, "delay": "off"}
    first = ResultsFile(tmp_path / "deep" / "r.jsonl", SUBJECT)
    for each in (trial(10.0), trial(11.0), trial(12.0, seconds=2.0)):
        first.add(settings, each)
    assert first.take(settings, 1.0) is None, "what it measured itself is not asked for again"
    first.close()
    again = ResultsFile(tmp_path / "deep" / "r.jsonl", SUBJECT)
    assert again.count == 3
    assert again.take({"delay": "off", "batch": 1}, 2.0) == trial(12.0, seconds=2.0)
    assert [again.take(settings, 1.0), again.take(settings, 1.0), again.take(settings, 1.0)] == [
        trial(10.0),
        trial(11.0),
        None,
    ]
    assert again.take({"batch": 2, "delay": "off"}, 1.0) is None
    again.close()


def test_a_line_that_was_broken_off_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    file = ResultsFile(path, SUBJECT)
    file.add({"batch": 1}, trial(10.0))
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"settings":{"batch":2},"tri')
    file = ResultsFile(path, SUBJECT)
    assert file.count == 1
    file.add({"batch": 2}, trial(20.0))
    file.close()
    assert path.read_bytes().startswith(whole)
    assert len(path.read_bytes().splitlines()) == 3
    path.write_bytes(b'{"half a head')
    fresh = ResultsFile(path, SUBJECT)
    assert fresh.count == 0
    fresh.close()
    assert len(path.read_bytes().splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load": {"levels": ["9"]}}, "another load"),
        ({"digest": "e"}, "another state of the models' files"),
        ({"machine": "4 cores"}, "another machine"),
    ],
)
def test_results_of_something_else_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "r.jsonl", SUBJECT)
    file.add({"batch": 1}, trial(10.0))
    file.close()
    before = (tmp_path / "r.jsonl").read_bytes()
    with pytest.raises(InvalidArgument, match=f"has results of {message}"):
        ResultsFile(tmp_path / "r.jsonl", msgspec.structs.replace(SUBJECT, **change))
    assert (tmp_path / "r.jsonl").read_bytes() == before


def test_another_budget_goes_on_with_the_seconds_that_were_measured(tmp_path: Path) -> None:
    longer = msgspec.structs.replace(SUBJECT, seconds=9.0)
    ResultsFile(tmp_path / "r.jsonl", SUBJECT).close()
    file = ResultsFile(tmp_path / "r.jsonl", longer)
    assert file.seconds == 9.0, "nothing was measured yet"
    file.add({"batch": 1}, trial(10.0, seconds=9.0))
    file.close()
    again = ResultsFile(tmp_path / "r.jsonl", SUBJECT)
    assert (again.seconds, again.count) == (9.0, 1)
    again.close()


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    first = ResultsFile(tmp_path / "r.jsonl", SUBJECT)
    first.add({"batch": 1}, trial(10.0))
    with pytest.raises(InvalidArgument, match=r"another run writes its results to .*r\.jsonl"):
        ResultsFile(tmp_path / "r.jsonl", SUBJECT)
    first.close()
    again = ResultsFile(tmp_path / "r.jsonl", SUBJECT)
    assert again.count == 1
    again.close()


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("my notes\n")
    with pytest.raises(InvalidArgument, match="is no file of results"):
        ResultsFile(path, SUBJECT)
    assert path.read_text() == "my notes\n"
