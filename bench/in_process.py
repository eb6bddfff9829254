"""What the server costs inside a program, in CPU time.

    python -m charonia.bench.in_process
    python -m charonia.bench.in_process --checkpoint DIR --sequences 16

Microseconds of a call with 4 KB to a model that gives back what it gets, for a thread and for a task of an event loop:
the best of many rounds, for others may use the machine. And the CPU time of the program while `LLM.generate` answers
prompts, beside that of the engine's process.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from cyclopts import App

from .. import LLM, Model, SamplingParams, Server
from ..core.errors import Unavailable
from .checkpoint import ShapeName, prepare_checkpoint
from .command import Count, exit_on_error, log_to, report_console, run_command, table_of
from .server_process import CpuMeter, CpuSeconds

_IDENTITY = """backend: "identity"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
_VALUES = np.zeros(1024, np.float32)
_CALLS = 1000

app = App(name="python -m charonia.bench.in_process", help=__doc__)


def call_costs(rounds: int) -> tuple[float, float]:
    """Microseconds of CPU of a thread's call, and of a task's."""
    with TemporaryDirectory(prefix="charonia-bench-") as directory:
        (Path(directory) / "echo" / "1").mkdir(parents=True)
        (Path(directory) / "echo" / "config.pbtxt").write_text(_IDENTITY)
        with Server(model_repository=directory) as server:
            model = server.model("echo")
            return _best(rounds, lambda: _ask(model)), asyncio.run(_best_of_tasks(rounds, model))


def _ask(model: Model) -> None:
    for _ in range(_CALLS):
        for _ in model.infer(inputs={"IN": _VALUES}):
            pass


def _best(rounds: int, work: Callable[[], None]) -> float:
    return min(_microseconds(work) for _ in range(rounds))


def _microseconds(work: Callable[[], None]) -> float:
    begun = time.thread_time()
    work()
    return (time.thread_time() - begun) * 1e6 / _CALLS


async def _best_of_tasks(rounds: int, model: Model) -> float:
    costs = []
    for _ in range(rounds):
        begun = time.thread_time()
        for _ in range(_CALLS):
            async for _ in model.async_infer(inputs={"IN": _VALUES}):
                pass
        costs.append((time.thread_time() - begun) * 1e6 / _CALLS)
    return min(costs)


def program_cpu(checkpoint: Path, sequences: int, prompt: int, new: int, repeats: int) -> CpuSeconds:
    """CPU seconds of the program and of the engine, of all repeats together: int8, one thread."""
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    drawn = np.random.default_rng(0)
    lengths = {"max_model_len": prompt + new, "max_num_seqs": sequences, "kv_cache_bytes": 256 << 20}
    with LLM(checkpoint, quantization="int8", threads=1, **lengths) as llm:
        meter = CpuMeter(os.getpid())
        meter.start()
        for _ in range(repeats):
            llm.generate(drawn.integers(0, 90, (sequences, prompt)).tolist(), params)
        spent = meter.spent()
    if spent is None:
        raise Unavailable("the CPU time of the engine's process cannot be read here")
    return spent


@app.default
def main(
    *,
    checkpoint: Path | None = None,
    shape: ShapeName = "qwen2.5-0.5b",
    rounds: Count = 50,
    sequences: Count = 16,
    prompt: Count = 64,
    new: Count = 32,
    repeats: Count = 3,
) -> None:
    """Print the table.

    Parameters
    ----------
    checkpoint
        Directory of a checkpoint; by default random weights are made.
    shape
        Whose shape random weights have.
    rounds
        Rounds of 1,000 calls, the best of which counts.
    sequences
        Prompts of each `generate`.
    prompt
        Tokens of each prompt.
    new
        New tokens of each prompt.
    repeats
        Calls of `generate`.
    """
    console = report_console()
    table = table_of(["in a program"], ["CPU"])
    with exit_on_error():
        thread, task = call_costs(rounds)
        table.add_row("identity, a thread's call", f"{thread:.1f} us")
        table.add_row("identity, a task's call", f"{task:.1f} us")
        with prepare_checkpoint(checkpoint, shape, None, log_to(console)) as (source, _):
            spent = program_cpu(source, sequences, prompt, new, repeats)
        table.add_row(f"LLM.generate, {sequences} sequences: the engine", f"{spent.engine:.2f} s")
        table.add_row("the program beside it", f"{spent.frontend:.2f} s, {spent.frontend / spent.engine:.2%}")
    console.print(table)


if __name__ == "__main__":
    run_command(app)
