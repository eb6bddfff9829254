"""The measurements for a GPU, of a tiny model on the CPU: every row comes, and reaches the file at once."""

import json
from pathlib import Path

from charonia.bench.gpu import LLAMA_EIGHT_BILLION, Figure, GpuBench, GpuWork, measure

TINY = LLAMA_EIGHT_BILLION | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 384,
}
WORK = GpuWork(TINY, "float32", (1, 3), 24, (2, 40), 64, 2, 3, 8, 4, 1 << 20, 64, experts=(4, 2, 64, 32))


class Cpu(GpuBench):
    def transformers_offline(self) -> list[Figure]:  # type: ignore[override] - its continuous batching needs a GPU
        raise RuntimeError("no GPU")


def test_every_row_is_measured_and_one_that_fails_takes_none_with_it(tmp_path: Path) -> None:
    told: list[str] = []
    assert measure(Cpu(WORK, "cpu"), tmp_path / "out", 9, told.append) == 1
    assert told[-1] == "failed: RuntimeError: no GPU"
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [line["name"] for line in lines] == [
        "copy bandwidth",
        "float32 products",
        "attention, decode of 2 at 40",
        "attention, prefill of 64",
        *(
            f"decode step of {rows}{what}"
            for rows in ("1 at 24", "3 at 24", "3 at 24 with 4 drafts each")
            for what in ("", ": host's time to launch it", ": launched kernel by kernel so far")
        ),
        "prefill of 64",
        "attention, decode of 2 at 40, cache in int8",
        "attention, prefill of 64, cache in int8",
        "2 tokens by 4 experts, float32",
        "offline, 2 sequences",
        "offline, 3 sequences",
    ]
    assert all(line["value"] > 0 for line in lines if line["unit"] != "steps")


def test_rows_that_have_no_time_are_left_out(tmp_path: Path) -> None:
    told: list[str] = []
    assert measure(Cpu(WORK, "cpu"), tmp_path / "out", 0, told.append) == 0
    assert told == ["no time is left for the rest"]


def test_a_figure_says_whether_its_bar_is_met() -> None:
    told = str(Figure("prefill", 512, "ms", 0.61, "peak", 0.6))
    assert told == "prefill: 512 ms, 0.61 of peak (bar 0.6: met)"
