"""Pictures here and at vLLM's CPU build: `python -m tests.proofs.picture_peers PYTHON`, an interpreter that has vLLM.

Both serve one checkpoint of Qwen2.5-VL's kind in bfloat16 over HTTP, with random weights: 360 million in the language
part, 95 million in the tower. Told is the TTFT of pictures of 1,024 x 768, each another one, alone and eight at once,
in turns that begin some seconds after one another: a process of vLLM's keeps a core busy for a second after its last
request.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from charonia.bench.command import table_of
from charonia.bench.peers import vllm_environment
from charonia.bench.server_process import LOOPBACK, ServerAddress, free_ports, own_server, run_process, until_open
from charonia.bench.trial import TrialVerdict, ratio_of, show_verdicts, take_turns
from charonia.tokenization.tokenizer_json import read_tokenizer

from ..e2e.models import write_model
from ..seeing_models import write_chat_template
from .neighbours import first_token
from .pictures import HALF_BILLION, NAME, image_part, question, write_checkpoint

SHAPE = HALF_BILLION._replace(
    eye={**HALF_BILLION.eye, "depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072},
    parameters={"dtype": "bfloat16"},
)
_LARGE = (1024, 768)
_PAUSE = 3.0
_WARM = 8
"""Pictures at once before anything is measured: what is done for the first time takes longer."""

app = App(name="python -m tests.proofs.picture_peers", help=__doc__)


@contextmanager
def vllm_server(python: str, checkpoint: Path, folder: Path) -> Iterator[ServerAddress]:
    """vLLM's server of OpenAI's API over a checkpoint, which it calls by NAME."""
    [port] = free_ports(1)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--served-model-name", NAME, "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "8"]
    command += ["--host", LOOPBACK, "--port", str(port)]
    prefix = str(Path(python).absolute().parent.parent)
    environment = vllm_environment(prefix, sorted(os.sched_getaffinity(0)), str(folder))
    with run_process(command, environment) as (pid, alive):
        place = ServerAddress(LOOPBACK, port, 0, pid, None, alive.output)
        until_open(place, alive)
        yield place


def write_for_both(folder: Path) -> Path:
    """A checkpoint of SHAPE with what vLLM reads of one, and ours does not: tokens around pictures, and films."""
    checkpoint = write_checkpoint(folder, SHAPE)
    tokenizer, _ = read_tokenizer(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    for part in ("video", "vision_start", "vision_end"):
        token = "<|video_pad|>" if part == "video" else f"<|{part}|>"
        config[f"{part}_token_id"] = tokenizer.token_to_id(token)
    (checkpoint / "config.json").write_text(json.dumps(config))
    settings = json.loads((checkpoint / "preprocessor_config.json").read_text())
    del settings["image_processor_type"]
    films = settings | {"video_processor_type": "Qwen2VLVideoProcessor"}
    (checkpoint / "video_preprocessor_config.json").write_text(json.dumps(films))
    write_chat_template(checkpoint, "<|vision_start|><|image_pad|><|vision_end|>")
    return checkpoint


async def _ask(place: ServerAddress, numbers: range) -> float:
    """The median TTFT of these pictures, asked for at once."""
    bodies = [json.dumps(question(image_part(_LARGE, number))).encode() for number in numbers]
    return median(await asyncio.gather(*[first_token(place, body) for body in bodies]))


@app.default
def main(
    python: str, *, repeats: int = 3, at_once: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (1, 8)
) -> None:
    """Measure.

    Parameters
    ----------
    python
        The interpreter that has vLLM.
    repeats
        Turns of both.
    at_once
        How many pictures are asked for together.
    """
    console = Console()
    table = table_of((), ("at once", "charonia", "vLLM", "charonia / vLLM"))
    verdicts = []
    with TemporaryDirectory(prefix="charonia-proof-") as scratch:
        folder = Path(scratch)
        checkpoint = write_for_both(folder / "checkpoint")
        write_model(folder / "models", NAME, checkpoint, max_num_seqs=8, **SHAPE.parameters)
        models = ("--model-repository", str(folder / "models"))
        with own_server(*models) as ours, vllm_server(python, checkpoint, folder / "vllm") as theirs:
            for place in (ours, theirs):
                asyncio.run(_ask(place, range(_WARM)))
            pictures = count(_WARM, max(at_once))
            for number in at_once:

                def ask(place: ServerAddress, number: int = number) -> float:
                    first = next(pictures)
                    time.sleep(_PAUSE)
                    return asyncio.run(_ask(place, range(first, first + number)))

                turns = take_turns(
                    {"charonia": lambda _: ask(ours), "vLLM": lambda _: ask(theirs)},
                    repeats,
                    lambda line, number=number: console.print(f"{number} at once, {line}"),
                    "{:.2f} s".format,
                )
                ratio = ratio_of(turns["charonia"], turns["vLLM"], float)
                seconds = (f"{median(turns[name]):.2f} s" for name in ("charonia", "vLLM"))
                table.add_row(str(number), *seconds, f"{ratio:.2f}")
                verdicts.append(TrialVerdict(f"TTFT of {number} over vLLM's", ratio, 1, False))
    console.print(table)
    show_verdicts(console, verdicts)
    sys.exit(not all(verdict.met for verdict in verdicts))


if __name__ == "__main__":
    app()
