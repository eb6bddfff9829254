"""What a drafter is worth: drafters, numbers of drafts, streams and kinds of text, beside the same without drafts.

    python -m charonia.bench.speculation --scratch DIR
    python -m charonia.bench.speculation --checkpoint DIR --precision bf16 --drafters ngram oracle --k 2 4 --streams 1 8
    python -m charonia.bench.speculation --replay --drafters ngram '{"method": "ngram", "prompt_lookup_min": 2}'

A scheduler for each drafter and one without take turns over one model, A B A B, and what they sample is compared in the
same run. Random weights say nothing that could be guessed: with `--target record`, as without a `--checkpoint`, every
product is computed and every token sampled, but a sequence goes on with the recorded answer's tokens. `--replay` asks
drafters alone, against the records, without a model.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from cyclopts import App, Parameter
from cyclopts.validators import Number

from ..core.errors import InvalidArgument
from ..engine.config import SpeculationConfig
from ..engine.core.drafters import build_drafter
from ..engine.drafters.laboratory import Record
from ..engine.options import read_speculation_config
from ..scheduler.speculation import DraftRequest
from .checkpoint import ShapeName
from .command import Count, Log, exit_on_error, log_to, report_console, run_command
from .load.figures import require_matplotlib
from .offline import prepare_checkpoint
from .roofline import Precision
from .speculation_report import (
    SpeculationComparison,
    SpeculationTurn,
    StepCost,
    show,
    show_replay,
    write_json,
    write_plot,
)
from .speculation_texts import TEXT_KINDS, RecordedText, TextKind, read_texts, write_records
from .speculation_trial import Acceptance, Arm, Contender, Laboratory, RunFigures

TargetTokens: TypeAlias = Literal["record", "model"]
_Several = Parameter(consume_multiple=True)
_Counts = Parameter(consume_multiple=True, validator=Number(gt=0))
_REPLAYED_VOCABULARY = 1 << 18

app = App(name="python -m charonia.bench.speculation", help=__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationWork:
    """The work of a comparison."""

    drafters: Annotated[tuple[str, ...], _Several] = ("ngram", "oracle", "random")
    """Methods, or whole values of --speculative-config."""
    k: Annotated[tuple[int, ...], _Counts] = (4,)
    """Drafts of a sequence in a step, for methods that are given by name."""
    rates: Annotated[tuple[float, ...], _Several] = (0.8, 0.6, 0.45, 0.35)
    """How often the method synthetic is right, by place; and a model that drafts, about a record."""
    streams: Annotated[tuple[int, ...], _Counts] = (1,)
    """Sequences at once."""
    kinds: Annotated[tuple[TextKind, ...], _Several] = TEXT_KINDS
    """Kinds of text."""
    new: Count = 1000
    """New tokens of a sequence, at most; the recorded answers are shorter."""
    repeats: Count = 3
    """Turns of each drafter at each kind and number of streams."""
    everything: bool = False
    """Verify every draft, whatever it costs."""
    commit: int | None = None
    """Let so many drafts of a step be right at most: with --everything, what machinery costs."""


def build_arms(work: SpeculationWork, record: Path) -> list[Arm]:
    """The drafters to compare.

    Raises:
        InvalidArgument: there is none of a name, or a key means nothing.
    """
    arms = []
    for drafter in work.drafters:
        if drafter.startswith("{"):
            config = read_speculation_config(drafter)
            given = msgspec.json.decode(drafter, type=dict[str, Any])
            keys = [f"{key.removeprefix('prompt_')}={value}" for key, value in given.items() if key != "method"]
            arms.append(Arm(" ".join([config.method, *keys]), config, work.everything, work.commit, work.rates))
            continue
        for k in work.k:
            asked: dict[str, Any] = {"method": drafter, "num_speculative_tokens": k}
            if drafter in ("oracle", "synthetic"):
                asked["record"] = str(record)
            if drafter == "synthetic":
                asked["synthetic_acceptance_rates"] = work.rates
            config = read_speculation_config(msgspec.json.encode(asked).decode())
            arms.append(Arm(f"{drafter} k={k}", config, work.everything, work.commit))
    return arms


def compare(
    checkpoint: Path,
    precision: Precision,
    target: TargetTokens,
    texts: Sequence[RecordedText],
    work: SpeculationWork,
    log: Log,
) -> SpeculationComparison:
    """Every drafter at every kind of text and number of streams, in turns with none.

    Raises:
        InvalidArgument: a drafter there cannot be, or not here.
    """
    with TemporaryDirectory(prefix="charonia-bench-") as folder, ExitStack() as stack:
        record, recorded = Path(folder) / "record.jsonl", target == "record"
        arms = build_arms(work, record)
        computing = _computing(arms)
        model = stack.enter_context(
            closing(
                Laboratory(str(checkpoint), precision, texts, max(work.streams), recorded=recorded, computing=computing)
            )
        )
        none = model.contender(Arm("none"))
        records: Sequence[Record] = texts
        if target == "model":
            log("the model's own answers ...")
            records = [_answer(model, none, text, work.new) for text in texts]
        write_records(record, records)
        contenders = [none, *map(model.contender, arms)]
        by_kind: dict[TextKind, list[Record]] = {}
        for text, each in zip(texts, records, strict=True):
            by_kind.setdefault(text.kind, []).append(each)
        turns = [
            turn
            for streams in work.streams
            for kind, asked in by_kind.items()
            for repeat in range(work.repeats)
            for turn in _play_round(model, contenders, kind, asked, streams, work.new, repeat, log)
        ]
        return SpeculationComparison(
            checkpoint=checkpoint.name,
            precision=precision,
            target=target,
            machine=model.machine,
            turns=turns,
            costs=list(_step_costs(contenders, turns)),
        )


def _computing(arms: Sequence[Arm]) -> SpeculationConfig | None:
    """The draft model among these drafters."""
    found = [arm.config for arm in arms if arm.config is not None and arm.config.computes]
    if len(found) > 1:
        raise InvalidArgument("drafters: one of them at most may be a model's", field="drafters")
    return found[0] if found else None


def _answer(model: Laboratory, contender: Contender, text: RecordedText, new: int) -> Record:
    model.run(contender, [text], new)
    return model.said(text)


def _play_round(
    model: Laboratory,
    contenders: Sequence[Contender],
    kind: TextKind,
    records: Sequence[Record],
    streams: int,
    new: int,
    repeat: int,
    log: Log,
) -> Iterator[SpeculationTurn]:
    """One turn of every contender: all records once, so many at a time. Each round another one is the first, and each
    other round goes backwards: who comes after himself, or after whom, tells in steps of half a millisecond."""
    asked = [records[at % len(records)] for at in range(max(streams, len(records)))]
    batches = [asked[at : at + streams] for at in range(0, len(asked), streams)]
    turned = [*contenders[repeat % len(contenders) :], *contenders[: repeat % len(contenders)]]
    for contender in turned if repeat % 2 == 0 else reversed(turned):
        figures = RunFigures.together([model.run(contender, batch, new) for batch in batches])
        log(f"{kind}, {streams} streams, {contender.arm.label}: {figures.speed:.1f} tokens/s")
        yield SpeculationTurn(kind=kind, streams=streams, drafter=contender.arm.label, repeat=repeat, figures=figures)


def _step_costs(contenders: Sequence[Contender], turns: Sequence[SpeculationTurn]) -> Iterator[StepCost]:
    """Of every number of tokens that steps had, what they took, and what the last scheduler that knows believes."""
    measured: dict[int, list[float]] = {}
    for turn in turns:
        for tokens, seconds in turn.figures.verifying.items():
            measured.setdefault(tokens, []).extend(seconds)
    for tokens, seconds in sorted(measured.items()):
        beliefs = [each for contender in contenders if (each := contender.predicted(tokens)) is not None]
        believed = float(np.median(beliefs)) if beliefs else None
        yield StepCost(tokens=tokens, steps=len(seconds), measured=float(np.median(seconds)), predicted=believed)


def replay(texts: Sequence[RecordedText], arms: Sequence[Arm], new: int) -> Iterator[SpeculationTurn]:
    """Every drafter against every text, as if all its drafts were verified; the seconds are the drafter's alone."""
    for arm in arms:
        assert arm.config is not None
        if arm.config.computes:
            raise InvalidArgument(
                f"{arm.config.method} cannot be replayed: it computes beside a model", field="drafters"
            )
        drafter = build_drafter(arm.config, _REPLAYED_VOCABULARY)
        for number, text in enumerate(texts):
            prompt, output = np.array(text.prompt_tokens, np.int32), text.output_tokens[:new]
            acceptance, spent = Acceptance(arm.k), list[float]()
            tokens, state = output[:1], dict[str, Any]()
            while len(tokens) < len(output):
                most = min(arm.k, len(output) - 1 - len(tokens))
                begun = perf_counter()
                [guess] = drafter.propose([DraftRequest(prompt, tokens, most, state, f"text {number}")])
                spent.append(perf_counter() - begun)
                coming = output[len(tokens) :]
                right = next(
                    (at for at, token in enumerate(guess[:most]) if token != coming[at]), min(len(guess), most)
                )
                acceptance.count(min(len(guess), most), right)
                tokens += coming[: right + 1]
            figures = RunFigures.of_replay(acceptance, spent)
            yield SpeculationTurn(kind=text.kind, streams=1, drafter=arm.label, repeat=0, figures=figures)


@app.default
def main(
    *,
    checkpoint: Path | None = None,
    shape: ShapeName = "qwen2.5-0.5b",
    scratch: Path | None = None,
    precision: Precision = "int8",
    target: TargetTokens | None = None,
    tokenizer: Path | None = None,
    replay_only: Annotated[bool, Parameter(name="--replay", negative=())] = False,
    work: Annotated[SpeculationWork, Parameter("*")] = SpeculationWork(),
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Print the tables; end with status 1 where drafts changed what was sampled.

    Parameters
    ----------
    checkpoint
        Directory of a checkpoint; by default random weights are made.
    shape
        Whose shape random weights have.
    scratch
        Where they are kept for the next run.
    precision
        What to compute with.
    target
        Whose tokens sequences go on with: the record's or the model's; by default the model's where a checkpoint is
        given.
    tokenizer
        A tokenizer.json to read the texts with; by default the checkpoint's, or the demo model's ids.
    replay_only
        Ask the drafters alone, without a model.
    json
        Write every turn here.
    plot
        Draw the ratios here; needs matplotlib.
    """
    console = report_console()
    own = None if checkpoint is None else checkpoint / "tokenizer.json"
    texts = read_texts(work.kinds, tokenizer or own)
    with exit_on_error(), ExitStack() as stack:
        if plot:
            require_matplotlib()
        if replay_only:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="charonia-bench-")))
            write_records(record := folder / "record.jsonl", texts)
            seen = list(replay(texts, build_arms(work, record), work.new))
            show_replay(console, seen)
            if json:
                json.write_bytes(msgspec.json.encode(seen))
            return
        log = log_to(console)
        target = target or ("record" if checkpoint is None else "model")
        found, _ = stack.enter_context(prepare_checkpoint(checkpoint, shape, scratch, log))
        result = compare(found, precision, target, texts, work, log)
        show(console, result)
        if json:
            write_json(json, result)
        if plot:
            write_plot(plot, result)
    if result.differing:
        print(f"charonia: {result.differing} sampled tokens are others than without drafts", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run_command(app)
