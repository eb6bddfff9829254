"""The measurements for a GPU, of tiny models on the CPU: every row comes, and reaches the files at once."""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from time import perf_counter
from typing import Any

import pytest
import torch
from safetensors import safe_open

from charonia.bench import gpu
from charonia.bench.gpu import app, measure, replace_process
from charonia.bench.gpu_bench import GpuBench
from charonia.bench.gpu_engine import LLAMA_EIGHT_BILLION, GpuWork, without_graphs
from charonia.bench.gpu_report import Figure, GpuReport, Row
from charonia.bench.gpu_served import StreamLoads
from charonia.engine.cpu.recurrent import RecurrenceShape
from charonia.engine.gpu import runtime
from charonia.engine.gpu.few_rows import FewRowProducts
from tests.cuda_stand_in import StandInCuda
from tests.recording import compute_on_queue

TINY = LLAMA_EIGHT_BILLION | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 384,
}
WORK = GpuWork(
    "tiny",
    TINY,
    "float32",
    batches=(1, 3),
    context=24,
    attended=(2, 40),
    far=(2, 3, 80),
    prompt=64,
    offline=2,
    more_offline=3,
    new=8,
    steps=4,
    copied=1 << 20,
    multiplied=64,
    experts=(4, 2, 64, 32),
    delta_rule=RecurrenceShape(4, 2, 16, 16, 0, 32, 64),
    scan=RecurrenceShape(4, 2, 16, 16, 96, 64, 0),
    latents=(4, 32, 16),
    served=StreamLoads({1: 1, 3: 3}, 5, 4, 384),
    frontends=(1,),
)


class Cpu(GpuBench):
    """One whose server does not come up; `flags`: what it was to be started with."""

    def __init__(self, work: GpuWork, pictures: Path) -> None:
        self.flags: list[str] = []
        super().__init__(work, "cpu", pictures, self.start_nothing)

    @contextmanager
    def start_nothing(self, checkpoint: str, *flags: str) -> Iterator[Any]:
        with safe_open(Path(checkpoint) / "model.safetensors", framework="pt") as file:
            assert file.get_slice("lm_head.weight").get_shape() == [384, 64]
        self.flags = [*flags]
        raise ConnectionError("no server")
        yield

    def transformers_offline(self) -> Iterator[Figure]:
        raise RuntimeError("no GPU")  # which its continuous batching needs
        yield


@pytest.fixture
def report(tmp_path: Path) -> GpuReport:
    return GpuReport("a card", tmp_path / "gpu.jsonl", tmp_path / "gpu.md", lambda line: None)


def test_every_row_is_measured_and_one_that_fails_takes_none_with_it(report: GpuReport, tmp_path: Path) -> None:
    bench = Cpu(WORK, tmp_path)
    measure(bench.table(Cpu(WORK._replace(name="small"), tmp_path)), report, perf_counter() + 10_000, pytest.fail)
    report.close(is_finished=True)
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "name" in line]
    steps = [*(f"decode step of {rows} at 24" for rows in (1, 3)), "prefill of 64"]
    pictures = "decode step of 3", "step of 3 and 8 tokens of a prompt"
    assert [line["name"] for line in lines] == [
        "copy bandwidth",
        "float32 products",
        "attention, decode of 2 at 40",
        "attention, prefill of 64",
        *(f"tiny {step}" for step in steps),
        "tiny decode step of 3 at 24 with 4 drafts each",
        "tiny step of 3 and 2 tokens of a prompt, launched",
        *(
            f"{layer}, {told}"
            for told in ("decode of 2", "prefill of 64")
            for layer in (
                "gated delta rule of 4 heads",
                "selective scan of 4 heads",
                "convolution of 128 channels",
            )
        ),
        "gated delta rule of 4 heads, prefill of 64 by chunks",
        "selective scan of 4 heads, prefill of 64 by chunks",
        "latent attention of 4 heads, decode of 2 at 40",
        "latent attention of 4 heads, prefill of 64",
        "2 tokens by 4 experts, float32",
        *(f"tiny {name} at 24: kernels at work" for name in pictures),
        *(f"small {step}" for step in steps),
        "attention, decode of 3 at 80",
        "attention, prefill of 80",
        "tiny decode step of 2 at 80",
        "attention, decode of 2 at 40, cache in int8",
        "attention, decode of 3 at 80, cache in int8",
        "attention, prefill of 64, cache in int8",
        "offline, 2 sequences",
        "offline, 3 sequences",
    ]
    assert all(line["value"] > 0 for line in lines)
    assert bench.flags == ["--device", "cpu", "--max-num-seqs", "3", "--frontends", "1"]
    assert report.last_line == "failed: tiny served, small served, transformers offline"
    table = (tmp_path / "gpu.md").read_text().splitlines()
    assert table[0] == "a card"
    assert len([line for line in table if line.startswith("| ")]) == 1 + len(lines)
    assert table[-1] == report.last_line
    assert {file.name for file in tmp_path.glob("*.svg")} == {"gpu-decode-step-of-3.svg", "gpu-step-of-3-mixed.svg"}


def test_steps_are_measured_by_what_can_be_switched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is as it was behind them."""
    bench, products, seen = Cpu(WORK, tmp_path), FewRowProducts(True), list[tuple[int, str, bool, bool]]()
    product = products.make(torch.ones(2, 2), None)

    def decode_steps(rows: int, how: str) -> Iterator[Figure]:
        seen.append((rows, how, product.uses_kernel, runtime._launches_dependently))
        yield Figure(how, 1, "ms")

    rank = bench.executor.rank
    bench.executor._rank = replace(rank, context=rank.context._replace(few_rows=products))
    monkeypatch.setattr(bench, "decode_steps", decode_steps)
    monkeypatch.setattr(runtime, "can_launch_dependently", lambda device: True)
    assert len([*bench.switched_steps()]) == 4
    assert seen == [
        (1, ", few rows by cuBLAS", False, False),
        (1, ", few rows by the kernel", True, False),
        (1, ", dependent launches", True, True),
        (3, ", dependent launches", True, True),
    ]
    assert not runtime._launches_dependently


def test_rows_that_have_no_time_are_left_out(report: GpuReport, tmp_path: Path) -> None:
    bench = Cpu(WORK, tmp_path)
    rows = [row for row in bench.table() if row.name in ("copy bandwidth", "experts")]
    measure(rows, report, perf_counter() + rows[0].seconds + 5, pytest.fail)
    report.close(is_finished=True)
    assert report.last_line == "nothing failed; left out for want of time: experts"


def test_a_run_goes_from_tests_to_a_last_line_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole of `make gpu`, on a CPU: three models, what fails comes again when it resumes, and what is done does
    not."""
    StandInCuda(1).put_in_place(monkeypatch)
    monkeypatch.setattr(gpu, "_device_works", lambda: True)
    monkeypatch.setattr(gpu, "GpuBench", lambda work, device, out: Cpu(WORK._replace(name=work.name), out))
    tests = tmp_path / "tests" / "gpu"
    tests.mkdir(parents=True)
    (tests / "pytest.ini").write_text("[pytest]\naddopts = -p no:asyncio -p no:xdist\n")
    (tests / "test_it.py").write_text("def test_it(): pass\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no xdist
    failed = ["8B served", "1B served", "transformers offline"]
    for resume in (False, True):
        with pytest.raises(SystemExit) as ended:
            gpu.main(tests=tests, out=tmp_path, minutes=60, resume=resume)
        assert ended.value.code == 1
        lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
        began = [line for line in lines if "began" in line or "failed" in line]
        assert [line.get("failed") for line in began] == [None, *failed * (1 + resume)]
        assert (tmp_path / "gpu.md").read_text().splitlines()[-1] == f"failed: {', '.join(failed)}"
    assert "1 passed" in capfd.readouterr().out
    names = [line.get("name") for line in lines]
    assert names.count("8B, batch-invariant, prefill of 64") == 1
    assert names.count("8B prefill of 64") == 2, "what a row that failed needs is measured again"


def test_a_row_that_never_ends_or_breaks_the_device_is_gone_on_without(
    report: GpuReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process, so the row has lost what it had measured there."""
    ended = Event()
    gone_on = list[str]()

    def begin_again(row: str) -> None:
        gone_on.append(row)
        ended.set()

    def hang() -> Iterator[Figure]:
        yield Figure("its first", 1, "ms")
        assert ended.wait(30)
        raise RuntimeError("too late")

    def break_device() -> Iterator[Figure]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", fail)
        raise RuntimeError("an illegal memory access was encountered")
        yield

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(gpu, "_GRACE", 0.05)
    measure([Row("hangs", 0, hang), Row("breaks", 20, break_device)], report, perf_counter() + 60, begin_again)
    assert gone_on == ["hangs", "breaks"]
    assert report.failures == gone_on
    assert not report.done


def test_the_process_that_goes_on_is_told_what_this_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, commands = list[tuple[int, int]](), list[list[str]]()
    monkeypatch.setattr(gpu.os, "closerange", lambda *files: closed.append(files))
    monkeypatch.setattr(gpu.os, "execv", lambda program, command: commands.append(command))
    replace_process(3.456, Path("tests/gpu"), Path("there"), ("steps", "8B"), ("latents", "8B served"))
    replace_process(-1, None, Path(), (), ("latents",))
    assert closed == [(3, 4096)] * 2
    told = [app.parse_args(command[3:])[1].arguments for command in commands]
    assert told == [
        {
            "tests": Path("tests/gpu"),
            "out": Path("there"),
            "minutes": 3.46,
            "only": ("steps", "8B"),
            "resume": True,
            "without": ("latents", "8B served"),
        },
        {"out": Path(), "minutes": 0.0, "resume": True, "without": ("latents",)},
    ]


def test_graphs_are_back_behind_steps_that_fail(tmp_path: Path) -> None:
    rank = Cpu(WORK, tmp_path).executor.rank
    computer: Any = compute_on_queue(rank)
    computer.graphs = graphs = object()
    with suppress(RuntimeError), without_graphs(rank.runner):
        assert computer.graphs is None
        raise RuntimeError
    assert computer.graphs is graphs
