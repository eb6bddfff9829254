"""The laboratory of drafters, over a small model with random weights."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from charonia.bench.speculation import SpeculationWork, TargetTokens, build_arms, compare, replay
from charonia.bench.speculation_report import show, show_replay, write_json
from charonia.bench.speculation_texts import TEXTS, read_texts
from charonia.bench.speculation_trial import Acceptance, RecordedTarget
from charonia.core.errors import InvalidArgument
from charonia.engine.drafters.laboratory import Record
from charonia.scheduler.plan import StepPlan

WORK = SpeculationWork(
    drafters=("oracle", "random"), k=(3,), streams=(1, 4), kinds=("names",), new=24, repeats=1, everything=True
)


@pytest.mark.parametrize("target", ["record", "model"])
def test_drafters_take_turns_over_one_model(target: TargetTokens, root: Path, tmp_path: Path) -> None:
    demo = root / "examples" / "model_repository" / "demo" / "1"
    seen = compare(demo, "bf16", target, read_texts(WORK.kinds), WORK, log=lambda line: None)
    assert seen.drafters == ["none", "oracle k=3", "random k=3"]
    assert seen.differing == 0
    for streams in WORK.streams:
        none, oracle, random = (seen.cell("names", streams, drafter).own for drafter in seen.drafters)
        assert none.tokens == random.tokens == 23 * max(streams, 2)
        assert none.acceptance.drafted == none.wasted == 0
        assert oracle.acceptance.rates == [1, 1, 1]
        assert oracle.acceptance.length > 3.5
        assert oracle.acceptance.steps < none.acceptance.steps / 3
        assert max(random.acceptance.rates) < 0.1
        assert random.wasted > 2 * random.tokens
    assert {1, 4, 16} <= {cost.tokens for cost in seen.costs}
    show(Console(file=sys.stdout, width=200), seen)
    write_json(tmp_path / "seen.json", seen)
    assert (tmp_path / "seen.json").stat().st_size > 1000


def test_prompts_of_several_steps_are_followed_by_their_records(root: Path) -> None:
    """Their first steps sample nothing."""
    demo = root / "examples" / "model_repository" / "demo" / "1"
    work = SpeculationWork(drafters=("random",), k=(3,), streams=(4,), kinds=("edit",), new=8, repeats=1)
    texts = [
        msgspec.structs.replace(each, prompt_tokens=(2 * each.prompt_tokens)[:600]) for each in read_texts(work.kinds)
    ]
    assert len(texts[0].prompt_tokens) > 512
    assert compare(demo, "bf16", "record", texts, work, log=lambda line: None).differing == 0


def test_what_drafts_change_is_counted() -> None:
    """A sampled token that is another than before at the same place of a record, but not one after a wrong draft."""
    target, none = RecordedTarget([Record([5, 6], [10, 11, 12])]), np.zeros(0, np.int32)
    plain = StepPlan(
        1,
        np.array([0], np.int32),
        np.array([2], np.int32),
        np.array([1], np.int32),
        np.array([True]),
        np.array([1], np.int32),
        np.zeros((0, 2), np.int32),
        (),
        none,
    )
    target._rows[0] = 2, np.array([10, 11, 12], np.int32), np.array([-1, 70, 71], np.int32)
    drafted = plain._replace(counts=np.array([2], np.int32), drafts=np.array([1], np.int32))
    right, wrong = (drafted._replace(drafted=np.array([token], np.int32)) for token in (11, 9))
    assert target.dictate(plain, np.array([70], np.int32)).tolist() == [11]
    assert target.dictate(right, np.array([70, 71], np.int32)).tolist() == [11, 12]
    assert target.dictate(wrong, np.array([70, 99], np.int32)).tolist() == [11, 12]
    assert target.differing == 0
    target.dictate(right, np.array([70, 99], np.int32))
    assert target.differing == 1


def test_replay_asks_drafters_alone(capsys: pytest.CaptureFixture[str]) -> None:
    texts = read_texts(("edit", "chat"))
    arms = build_arms(SpeculationWork(drafters=("oracle", '{"method": "ngram", "prompt_lookup_min": 2}')), TEXTS)
    turns = list(replay(texts, arms, new=100))
    lengths = {(turn.drafter, turn.kind): turn.figures.acceptance.tokens_per_step for turn in turns}
    assert lengths["oracle k=4", "edit"] > 4.5
    assert lengths["ngram lookup_min=2", "edit"] > 2 > lengths["ngram lookup_min=2", "chat"]
    show_replay(Console(file=sys.stdout, width=200), turns)
    assert "oracle k=4" in capsys.readouterr().out


def test_drafters_that_there_are_not_are_refused() -> None:
    for drafter, said in (("guess", "method must be one of"), ('{"method": "ngram", "k": 3}', "k is unknown")):
        with pytest.raises(InvalidArgument, match=said):
            build_arms(SpeculationWork(drafters=(drafter,)), TEXTS)


def test_a_draft_model_is_not_replayed(root: Path) -> None:
    drafter = f'{{"method": "draft_model", "model": "{root / "examples" / "draft"}"}}'
    with pytest.raises(InvalidArgument, match="draft_model cannot be replayed"):
        list(replay([], build_arms(SpeculationWork(drafters=(drafter,)), TEXTS), new=10))


def test_a_draft_model_computes_beside_a_record_and_is_as_right_as_was_asked(root: Path) -> None:
    demo, draft = (root / "examples" / name for name in ("model_repository/demo/1", "draft"))
    drafter = f'{{"method": "draft_model", "model": "{draft}", "num_speculative_tokens": 2}}'
    work = SpeculationWork(drafters=(drafter,), rates=(1.0, 0.0), kinds=("names",), new=24, repeats=1, everything=True)
    seen = compare(demo, "bf16", "record", read_texts(work.kinds), work, log=lambda line: None)
    own = seen.cell("names", 1, seen.drafters[1]).own
    assert seen.differing == 0
    assert own.acceptance.rates == [1, 0]
    assert own.acceptance.drafted > 8


def test_acceptance_is_counted_by_place() -> None:
    acceptance = Acceptance(3)
    for drafts, accepted in ((3, 2), (0, 0), (1, 1), (2, 0)):
        acceptance.count(drafts, accepted)
    assert (acceptance.length, acceptance.tokens_per_step) == (2.0, 1.75)
    assert acceptance.histogram == [1, 1, 1, 0]
    assert acceptance.rates == [2 / 3, 1 / 2, 0]
