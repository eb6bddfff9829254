"""What embedding texts costs: our encoder backend beside sentence-transformers, and beside padded batches by
onnxruntime, which is how text-embeddings-inference computes on a CPU.

    pip install sentence-transformers
    python -m charonia.bench.embedders
    python -m charonia.bench.embedders --hidden 384 768 --texts 48 --repeats 5

Encoders of BERT's kind with random weights, and texts of 16 to 512 tokens. Contenders take turns, A B A B, over the
same texts, and their vectors must agree. Seconds are the processor's: on a shared machine their ratios hold where those
of a clock do not, with one thread, for several spin while they wait for each other. Ends with status 1 if a bar is
missed. What is not installed is left out, and said.
"""

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from cyclopts import App
from numpy.typing import NDArray

from ..core.encoder_tensors import EMBEDDING, TEXT
from ..core.errors import InvalidArgument
from .command import Count, Counts, Log, exit_on_error, log_to, report_console, run_command, table_of
from .padded_encoder import PaddedEncoder
from .random_encoder import TOKENS, write_encoder
from .trial import TrialVerdict, median_of, ratio_of, show_verdicts, take_turns

_OURS, _THEIRS, _PADDED = "charonia", "sentence-transformers", "onnxruntime, padded"
_PACKAGES = {_THEIRS: "sentence_transformers", _PADDED: "onnxruntime"}
_BARS = {_THEIRS: 1.5, _PADDED: 1.0}
"""Their CPU time in ours."""

_CLOSE = 1e-4
"""What numbers of normalised vectors may differ by."""
_SHORTEST, _LONGEST = 16, 512

Vectors: TypeAlias = NDArray[np.float32]
Encode: TypeAlias = Callable[[Sequence[str]], Vectors]
"""Texts -> their normalised vectors [N, size]."""


class EncodeRun(NamedTuple):
    """A turn of one contender: seconds of the processor and of a clock, and the tokens of its texts."""

    cpu: float
    wall: float
    tokens: int


app = App(name="python -m charonia.bench.embedders", help=__doc__)


def draw_texts(count: int, seed: int) -> list[str]:
    """Texts of random words, a token each, that have 16 to 512 tokens with the two around them."""
    random = np.random.default_rng(seed)
    lengths = random.integers(_SHORTEST, _LONGEST + 1, count) - 2
    return [" ".join(f"w{word}" for word in random.integers(0, TOKENS, length)) for length in lengths]


def _own_encoder(directory: Path) -> Encode:
    from ..classic_backends.encoder.encoder_backend import MAX_BATCH_TOKENS_ON_CPU, EncoderRuntime, TextReader
    from ..classic_backends.encoder.encoder_files import EmbedderFiles, read_encoder
    from ..classic_backends.encoder.encoder_modules import Embedder
    from ..tokenization.tokenizer_json import EncoderTokenizer

    files = read_encoder(directory)
    assert isinstance(files, EmbedderFiles), "it was written as one"
    tokenizer = EncoderTokenizer.load(directory, files.tokenization.max_tokens, files.tokenization.lowercase)
    runtime = EncoderRuntime(Embedder(files, "cpu"), TextReader(files, tokenizer).read, MAX_BATCH_TOKENS_ON_CPU)

    def encode(texts: Sequence[str]) -> Vectors:
        inputs = {TEXT: np.array([[text.encode()] for text in texts], np.object_)}
        return next(iter(runtime.execute(inputs, [EMBEDDING])))[EMBEDDING]

    return encode


def _sentence_transformer(directory: Path) -> Encode:
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(str(directory), device="cpu")
    return lambda texts: np.asarray(model.encode([*texts], batch_size=32, show_progress_bar=False), np.float32)


def _padded(directory: Path) -> Encode:
    import torch

    return PaddedEncoder(directory, torch.get_num_threads()).encode


_CONTENDERS: Mapping[str, Callable[[Path], Encode]] = {
    _OURS: _own_encoder,
    _THEIRS: _sentence_transformer,
    _PADDED: _padded,
}


def installed_contenders(log: Log) -> list[str]:
    """Those whose packages are here."""
    contenders = []
    for name in _CONTENDERS:
        package = _PACKAGES.get(name)
        if package is None or importlib.util.find_spec(package) is not None:
            contenders.append(name)
        else:
            log(f"{name} is left out: pip install {package.replace('_', '-')}")
    return contenders


def measure(directory: Path, names: Sequence[str], texts: int, repeats: int, log: Log) -> dict[str, list[EncodeRun]]:
    """Turns of the contenders over an encoder, each round with texts of its own.

    Raises:
        InvalidArgument: their vectors do not agree.
    """
    encoders = {name: _CONTENDERS[name](directory) for name in names}
    sample = draw_texts(min(texts, 8), repeats)
    vectors = {name: encode(sample) for name, encode in encoders.items()}
    for name, own in vectors.items():
        if (difference := float(np.abs(own - vectors[_OURS]).max())) > _CLOSE:
            raise InvalidArgument(f"vectors of {name} differ from ours by {difference:.1g}")

    def run(encode: Encode, number: int) -> EncodeRun:
        drawn = draw_texts(texts, number)
        tokens = sum(len(text.split()) + 2 for text in drawn)
        wall, cpu = time.perf_counter(), time.process_time()
        encode(drawn)
        return EncodeRun(time.process_time() - cpu, time.perf_counter() - wall, tokens)

    turns = {name: lambda number, encode=encode: run(encode, number) for name, encode in encoders.items()}
    return take_turns(turns, repeats, log, lambda turn: f"{turn.cpu:.2f} s of CPU for {turn.tokens} tokens")


@app.default
def main(
    *, hidden: Counts = (384, 768), layers: Count = 2, texts: Count = 48, repeats: Count = 3, threads: Count = 1
) -> None:
    """Measure.

    Parameters
    ----------
    hidden
        Widths of the encoders.
    layers
        Layers of each.
    texts
        Texts of a turn.
    repeats
        Turns of each contender.
    threads
        That each computes with.
    """
    import torch

    torch.set_num_threads(threads)
    console = report_console()
    log = log_to(console)
    verdicts = []
    table = table_of(("hidden", "contender"), ("CPU ms a text", "tokens/s of CPU", "CPU time in ours"))
    with exit_on_error():
        names = installed_contenders(log)
        for width in hidden:
            with TemporaryDirectory() as scratch:
                directory = Path(scratch)
                write_encoder(directory, width, layers)
                runs = measure(directory, names, texts, repeats, log)
            for name in names:
                ratio = ratio_of(runs[name], runs[_OURS], lambda run: run.cpu)
                milliseconds = median_of(runs[name], lambda run: run.cpu) / texts * 1e3
                rate = median_of(runs[name], lambda run: run.tokens / run.cpu)
                table.add_row(str(width), name, f"{milliseconds:.1f}", f"{rate:.0f}", f"{ratio:.2f}")
                if name in _BARS:
                    verdicts.append(TrialVerdict(f"{name}, hidden {width}", ratio, _BARS[name], True))
    console.print(table)
    show_verdicts(console, verdicts)
    sys.exit(not all(verdict.met for verdict in verdicts))


if __name__ == "__main__":
    run_command(app)
