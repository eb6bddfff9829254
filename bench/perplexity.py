"""The cost of quantisation: perplexity of a checkpoint on unseen text, as it is, in int8 and in int4.

`python -m charonia.bench.perplexity CHECKPOINT [--text FILE ...]`; without files, on the modules of Python's standard
library that the demo model's training held out. Computed by the engine's own layers and attention, window by window.
"""

import math
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from cyclopts import App, Parameter
from torch import Tensor

from ..engine.attention.backend import AttentionBackend, CacheSpec
from ..engine.attention.selector import create_backend
from ..engine.checkpoint.build_context import BuildContext
from ..engine.checkpoint.hf_checkpoint import open_checkpoint
from ..engine.checkpoint.quantised_weights import open_weights
from ..engine.client.tokenizer_bundle import TokenizerBundle
from ..engine.layers.recurrent_state import StateSlots
from ..engine.layers.step_context import StepContext
from ..engine.models.interfaces import Decoder
from ..engine.models.registry import checkpoint_builder
from ..engine.step_batch import StepBatch
from .command import report_console, table_of

BLOCK, WINDOW = 16, 512
SEED, SHARE = 20261120, 0.04
"""What examples/training/selection.json draws the held-out files by."""

app = App(name="python -m charonia.bench.perplexity", help=__doc__)


class PerplexityScore(NamedTuple):
    """`nats`: mean loss of a predicted token."""

    name: str
    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)


class ScoredModel:
    """A checkpoint in one precision, with a cache for one window."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype, quantization: str) -> None:
        place = BuildContext(dtype, torch.device("cpu"), WINDOW, quantization=quantization)
        built = checkpoint_builder(open_checkpoint(str(checkpoint))).build(place)
        self._decoder: Decoder = built.decoder
        heads = built.shape.heads, built.shape.kv_heads, built.shape.head_dim
        spec = CacheSpec(built.shape.cached_attention, *heads, BLOCK, dtype, place.device)
        self._attention: AttentionBackend = create_backend("auto", spec)
        self._attention.allocate(WINDOW // BLOCK)
        self._states = StateSlots(built.shape.states, 1, dtype, place.device)
        self._states.allocate(0)

    @torch.inference_mode()
    def losses(self, window: Tensor) -> Tensor:
        """[n - 1] in nats, of all tokens int64 [n] but the first."""
        blocks = torch.arange(WINDOW // BLOCK).unsqueeze(0)
        step = StepBatch.from_tokens(window, [0], [len(window)], blocks, BLOCK)
        context = StepContext(step, self._attention.begin_step(step), states=self._states.begin_step(step))
        logits = self._decoder.compute_logits(context, [step.positions[:-1]])
        assert logits is not None, "one rank is the last stage too"
        return F.cross_entropy(next(logits).float(), window[1:], reduction="none")


def score(name: str, model: ScoredModel, windows: list[Tensor]) -> PerplexityScore:
    losses = torch.cat([model.losses(window) for window in windows])
    return PerplexityScore(name, float(losses.double().mean()), len(losses))


def windows_of(checkpoint: Path, texts: list[str], most: int) -> list[Tensor]:
    """About `most` tokens, from the beginning of each text alike; no window spans two texts."""
    tokenizer = TokenizerBundle.load(str(checkpoint)).tokenizer
    ids = [torch.tensor(tokenizer.encode(text)) for text in texts]
    windows: list[Tensor] = []
    for start in range(0, max(map(len, ids)), WINDOW):
        for text_ids in ids:
            window = text_ids[start : start + WINDOW]
            if len(window) > 1 and sum(map(len, windows)) < most:
                windows.append(window)
    return windows


def held_out_modules() -> Iterator[str]:
    """The modules that examples/training/prepare.py holds out; its other sources are not on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        origin = f"stdlib/{path.relative_to(root).as_posix()}"
        if "site-packages" not in origin and "test" not in origin and is_held_out(origin):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.count("\n") > 20:
                yield text


def is_held_out(origin: str) -> bool:
    return random.Random(f"{SEED} {origin}").random() < SHARE


def compare(
    checkpoint: Path, windows: list[Tensor], dtype: torch.dtype = torch.bfloat16
) -> tuple[PerplexityScore, ...]:
    """The perplexities of the same windows: in `dtype`, and quantised with activations in `dtype`. Weights that are
    integers already are computed with as such in `dtype`, and as floats in float32, which comes first."""
    if open_weights(open_checkpoint(checkpoint)).quantization is not None:
        precisions = {"dequantised": torch.float32, "integers": dtype}
        return tuple(
            score(name, ScoredModel(checkpoint, precision, "none"), windows) for name, precision in precisions.items()
        )
    names = {"none": str(dtype).removeprefix("torch."), "int8": "int8", "int4": "int4"}
    return tuple(score(name, ScoredModel(checkpoint, dtype, how), windows) for how, name in names.items())


@app.default
def main(
    checkpoint: Path,
    /,
    *,
    text: Annotated[list[Path] | None, Parameter(consume_multiple=True)] = None,
    tokens: int = 50_000,
) -> None:
    """Measure.

    Parameters
    ----------
    checkpoint
        Directory with weights and tokenizer.json, or a file in GGUF.
    text
        Files to predict, UTF-8.
    tokens
        How many to predict at most.
    """
    texts = [path.read_text(encoding="utf-8") for path in text] if text else list(held_out_modules())
    plain, *quantized = compare(checkpoint, windows_of(checkpoint, texts, tokens))
    title = f"{len(texts)} texts, {plain.tokens} tokens predicted in windows of {WINDOW}"
    table = table_of((), ("precision", "perplexity", "nats a token", "ratio"), title)
    for scored in (plain, *quantized):
        ratio = scored.perplexity / plain.perplexity
        table.add_row(scored.name, f"{scored.perplexity:.3f}", f"{scored.nats:.4f}", f"{ratio:.4f}")
    report_console().print(table)


if __name__ == "__main__":
    app()
