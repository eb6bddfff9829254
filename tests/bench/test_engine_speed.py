"""Contenders in processes of their own, and the figures made of their turns."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from charonia.bench import engine_speed
from charonia.bench.checkpoint import write_random
from charonia.bench.engine_speed import (
    OfflineOptions,
    agreement,
    best_peaks,
    checkpoint_digest,
    prompts,
    warm_contenders,
)
from charonia.bench.engine_speed_report import OfflineComparison, OfflineRun, show, write_json
from charonia.bench.machine_peaks import PeakMeter
from charonia.bench.peer_process import PeerProcess, PeerSpec, parse_peer_specs
from charonia.bench.peer_runner import PeerSetup
from charonia.bench.roofline import MachinePeaks, OfflineJob
from charonia.core.errors import InvalidArgument, Unavailable
from charonia.engine.cpu import library

PYTHON = Path(sys.executable)
TINY = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("offline")
    write_random(directory, TINY)
    return directory


def setup(checkpoint: Path, **fields: object) -> PeerSetup:
    plain = {"precision": "fp32", "sequences": 3, "length": 16, "chunk": 32, "threads": 1, "device": "cpu"}
    return PeerSetup(checkpoint=str(checkpoint), folder=str(checkpoint), **(plain | fields))  # type: ignore[arg-type]


def test_a_contender_continues_every_prompt(checkpoint: Path) -> None:
    asked = prompts(OfflineJob(3, 8, 4), 64, seed=1)
    with PeerProcess(PeerSpec("charonia", "fp32", PYTHON), setup(checkpoint)) as contender:
        for count in (1, 3):
            spent = contender.generate(asked[:count], 4)
            assert [len(made) for made in spent.tokens] == [4] * count
            assert spent.speed == count * 4 / spent.seconds > 0
        assert contender.about.startswith("charonia ")
        assert library.describe() in contender.about


@pytest.mark.proof
def test_a_contender_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"transformers fp32: \w+: .*config.json"):
        PeerProcess(PeerSpec("transformers", "fp32", PYTHON), setup(tmp_path))


class MortalContender:
    """Starts; one whose name is in `dying` ends at its first prompts."""

    dying = {"llamacpp"}

    def __init__(self, entry: PeerSpec, setup: PeerSetup) -> None:
        self.spec = entry
        self._length = setup.length

    def __enter__(self) -> "MortalContender":
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(self, prompts: list[list[int]], new: int) -> None:
        assert max(map(len, prompts)) + new <= self._length
        if self.spec.name in self.dying:
            raise Unavailable(f"{self.spec.label}: no answer")


def test_a_peer_that_dies_of_its_first_prompts_leaves_the_others_a_comparison(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_speed, "PeerProcess", MortalContender)
    work, peers, log = OfflineOptions(precisions=("int8",)), [f"llamacpp={PYTHON}", f"openvino={PYTHON}"], list[str]()
    with warm_contenders(checkpoint, tmp_path, work, peers, log.append) as field:
        assert [contender.spec.label for contender in field.contenders] == ["charonia int8", "openvino int8"]
    assert log[-1] == "left out: llamacpp int8: no answer"
    with warm_contenders(checkpoint, tmp_path, OfflineOptions(new=1), [], log.append) as field:
        assert len(field.contenders) == 2  # a single new token is no more than their length has room for
    monkeypatch.setattr(MortalContender, "dying", {"charonia"})
    with pytest.raises(Unavailable), warm_contenders(checkpoint, tmp_path, work, peers, log.append):
        pass


def test_ours_comes_first_in_each_precision_and_peers_where_they_can() -> None:
    asked = parse_peer_specs(("bf16", "int8"), ["transformers", f"openvino={PYTHON}"])
    assert [entry.label for entry in asked] == [
        "charonia bf16",
        "transformers bf16",
        "openvino bf16",
        "charonia int8",
        "openvino int8",
    ]
    with pytest.raises(InvalidArgument, match="peer 'tgi' is unknown: transformers, openvino, llamacpp, vllm are not"):
        parse_peer_specs(("bf16",), ["tgi"])
    with pytest.raises(InvalidArgument, match="there is no interpreter /nowhere"):
        parse_peer_specs(("bf16",), ["openvino=/nowhere"])


def test_the_gauge_finds_limits_of_every_precision() -> None:
    gauge = PeakMeter(("fp32",), "cpu", 1)
    measured = gauge.measure()
    assert set(measured) == set(gauge.ways) == {"fp32"}
    assert all(machine.read > 1e8 and machine.peak > 1e8 for machine in measured.values())


def test_the_better_of_two_measurements_takes_each_number_by_itself() -> None:
    assert best_peaks(MachinePeaks(1.0, 4.0), MachinePeaks(2.0, 3.0)) == MachinePeaks(2.0, 4.0)


def test_a_prompt_agrees_where_its_first_new_token_does() -> None:
    ours = [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert agreement(ours, ours) == 1.0
    assert agreement([[1, 9], [3, 4], [0, 6], [7, 9]], ours) == 0.75


def test_exports_are_kept_for_one_state_of_one_checkpoint(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "1", tmp_path / "b" / "1"
    for folder in (one, other):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    before = checkpoint_digest(one)
    assert before == checkpoint_digest(one) != checkpoint_digest(other)
    (one / "config.json").write_text("{ }")
    assert checkpoint_digest(one) != before


def turn(name: str, speed: float, limit: float, agreement: float = 1.0) -> OfflineRun:
    job, machine = OfflineJob(1, 8, 4), MachinePeaks(1e9, 1e12)
    return OfflineRun(
        name=name, precision="bf16", job=job, speed=speed, machine=machine, limit=limit, agreement=agreement
    )


@pytest.fixture
def comparison() -> OfflineComparison:
    ours = [turn("charonia", speed, limit) for speed, limit in ((8.0, 10.0), (9.0, 18.0), (30.0, 40.0))]
    theirs = [turn("openvino", speed, 20.0, agreement) for speed, agreement in ((4.0, 0.5), (6.0, 1.0), (5.0, 0.75))]
    turns = [each for pair in zip(ours, theirs, strict=True) for each in pair]
    return OfflineComparison(
        checkpoint="c", threads=2, about={"charonia bf16": "charonia 1"}, ways={"bf16": "mm"}, turns=turns
    )


def test_shares_are_each_turns_own_and_ratios_are_of_medians(comparison: OfflineComparison) -> None:
    (job,) = comparison.jobs
    cell = comparison.cell("charonia", "bf16", job)
    assert (cell.speed, cell.limit, cell.share) == (9.0, 18.0, 0.75)
    assert comparison.ratio("openvino", "bf16", job) == 9.0 / 5.0
    assert comparison.rows == [("charonia", "bf16"), ("openvino", "bf16")]


def test_the_report_tells_limit_speeds_shares_and_ratios(
    comparison: OfflineComparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(Console(width=120), comparison)
    said = capsys.readouterr().out
    told = ("the machine's limit, bf16", "9.0  75%", "5.0  25%", "charonia / openvino, bf16", "1.80", "1.0 GB/s")
    for text in (*told, "openvino bf16 begins as we do in 75%"):
        assert text in said
    write_json(tmp_path / "seen.json", comparison)
    content = json.loads((tmp_path / "seen.json").read_bytes())
    assert [median["ours_over_this"] for median in content["medians"]] == [1.0, 1.8]
    assert len(content["comparison"]["turns"]) == 6
