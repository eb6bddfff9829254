"""Drafters beside none, over servers of the demo model."""

import json
from pathlib import Path

import pytest

from charonia.bench import drafters
from charonia.bench.drafters import DrafterRun, changed_answers, read_drafters, read_prompts
from charonia.core.errors import InvalidArgument


@pytest.mark.proof
def test_a_drafter_takes_turns_with_none(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo, out = root / "examples" / "model_repository" / "demo" / "1", tmp_path / "turns.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "for x in range(3):\n    print(x)\n" * 8}) + "\n")
    arguments = ["--drafters", "ngram", "--prompts", prompts, "--new", "48", "--repeats", "1", "--json", out]
    with pytest.raises(SystemExit) as ended:
        drafters.app([str(demo), *map(str, arguments)])
    assert ended.value.code in (0, None), "an answer was changed"
    turns = json.loads(out.read_text())
    assert list(turns) == ["none", "ngram"]
    [plain], [drafted] = turns["none"], turns["ngram"]
    assert plain["answers"] == drafted["answers"]
    assert plain["tokens"] == drafted["tokens"] == 48
    assert plain["verified"] == 0
    assert "tokens a verifying step" in capsys.readouterr().out


def test_answers_that_a_drafter_changed_are_counted() -> None:
    plain, changed = (
        DrafterRun(answers=answers, tokens=4, seconds=2.0, verified=2, accepted=3)
        for answers in (["a", "b"], ["a", "c"])
    )
    assert changed_answers([plain, changed], plain) == 1
    assert (plain.speed, plain.length) == (2.0, 2.5)


def test_drafters_that_there_are_not_are_refused() -> None:
    for drafter, said in (("guess", "method must be one of"), ('{"method": "ngram", "k": 3}', "k is unknown")):
        with pytest.raises(InvalidArgument, match=said):
            read_drafters([drafter])


def test_prompts_are_read_and_there_are_some_without_a_file(tmp_path: Path) -> None:
    assert len(read_prompts(None)) == 4
    broken = tmp_path / "prompts.jsonl"
    broken.write_text('{"text": 1}\n')
    with pytest.raises(InvalidArgument, match="prompts"):
        read_prompts(broken)
