"""The table of docs/architectures.md: `python -m tests.docs.architecture_table` writes it anew, in some minutes.

Of every causal language model that transformers has a tiny one with random weights is made and loaded, and its logits
over our cache are compared with transformers' own. Those that take more than text are judged by their usual
configuration alone.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from charonia.bench.checkpoint import write_random
from charonia.engine.checkpoint.model_spec import CheckpointError
from charonia.engine.models.transformers_fallback import TransformersDecoder
from charonia.engine.models.transformers_sequences import SequenceDecoder

from ..proofs.families import ARCHITECTURES, FAMILIES, TOLERANCE, build_and_compare, tiny_config

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
BEGIN, END = "<!-- made by tests.docs.architecture_table -->", "<!-- the end of what is made -->"
WAYS = {TransformersDecoder: "transformers, our attention", SequenceDecoder: "transformers, by sequence"}
NATIVE = "native"
REFUSED = "refused"
TRIED: dict[str, dict[str, Any]] = {
    "cpmant": {},
    "dory": {},
    "minimax": {},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xlm": {},
    "xlstm": {},
}
"""Model types that are refused for what a tiny model of theirs does, with what configurations need beside sizes."""
UNTRIED = {
    "blt": "it takes bytes, in patches that a model of their own cuts",
    "deepseek_v4": "its cache has layers of its own kind, of compressed keys",
    "dots3_note": "it takes more than text",
    "dots3_note_text": "not tried, for no tiny model is made of it; a checkpoint is checked when it is loaded",
    "emu3": "it takes more than text",
    "exaone": "its checkpoints need code of their own",
    "fuyu": "it takes more than text",
    "gemma4_assistant": "it drafts for another model, whose cache it reads",
    "gemma4_unified_assistant": "it drafts for another model, whose cache it reads",
    "git": "it takes more than text",
    "moshi": "it takes more than text",
    "musicgen": "it takes codes of sound, several a step",
    "musicgen_melody": "it takes codes of sound, several a step",
    "mllama": "it takes more than text",
    "prophetnet": "it predicts several tokens at each place, with attention of its own to them",
    "qwen4_exp": "it takes more than text",
    "qwen4_exp_text": "not tried, for no tiny model is made of it; a checkpoint is checked when it is loaded",
    "reformer": "its attention is by hashes over a whole text",
    "phi4_multimodal": "its language part has adapters that are chosen by the images and sounds of a prompt",
}
"""Model types that no tiny model is made of, and why they are not served."""


class TableRow(NamedTuple):
    """An architecture, how it is computed, and, if it is refused, why."""

    architecture: str
    model_types: tuple[str, ...]
    way: str
    reason: str = ""

    def __str__(self) -> str:
        types = ", ".join(f"`{name}`" for name in self.model_types)
        return f"| {self.architecture} | {types} | {self.way} | {self.reason} |"


def architectures() -> dict[str, list[str]]:
    """The causal language models of transformers that are not made for more than text, with their model types."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types = defaultdict(list)
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if not name.endswith("ForConditionalGeneration"):
            types[name].append(model_type)
    return dict(sorted(types.items()))


def row_of(architecture: str, model_types: list[str]) -> TableRow:
    """The row of an architecture by the best of its model types: what a wrapper refuses, its text alone may be."""
    outcomes = [outcome(model_type) for model_type in model_types]
    way, reason = min(outcomes, key=lambda result: (result[0] == REFUSED, result[1] == UNTRIED.get("fuyu")))
    return TableRow(architecture, tuple(sorted(model_types)), way, reason)


def outcome(model_type: str) -> tuple[str, str]:
    """How a model type is computed, and why not if it is refused."""
    if model_type in UNTRIED:
        return REFUSED, UNTRIED[model_type]
    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        try:
            if model_type in ARCHITECTURES | FAMILIES:
                write_random(directory, tiny_config(model_type))
            elif model_type in TRIED:
                write_random(directory, tiny_config(model_type, TRIED[model_type]))
            else:
                _write_usual_config(directory, model_type)
            decoder, error = build_and_compare(directory)
        except CheckpointError as refused:
            return REFUSED, _reason(refused.message)
    assert error < TOLERANCE, f"{model_type}: its logits are wrong by {error:.1%}"
    return WAYS.get(type(decoder), NATIVE), ""


def _write_usual_config(directory: Path, model_type: str) -> None:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config: Any = CONFIG_MAPPING[model_type]()
    fields = config.to_dict() | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]}
    (directory / "config.json").write_text(json.dumps(fields, default=str))


def _reason(message: str) -> str:
    return message.rpartition("is not supported: ")[2].replace("|", "\\|")


def page_rows() -> Iterator[tuple[str, str]]:
    """The architectures that the page has, and how each is computed."""
    table = PAGE.read_text().partition("|---|---|---|---|\n")[2].partition("\n\n")[0]
    for line in table.splitlines():
        architecture, _, way, _ = line.removeprefix("| ").split(" | ", 3)
        yield architecture, way


def main() -> None:
    rows = []
    for architecture, model_types in architectures().items():
        rows.append(row_of(architecture, model_types))
        print(rows[-1], flush=True)
    served = [row for row in rows if row.way != REFUSED]
    own = [row for row in rows if row.architecture.endswith("ForCausalLM")]
    count = sum(row.way != REFUSED for row in own)
    head = f"transformers {version('transformers')}: {count} of {len(own)} named `ForCausalLM` are served, and "
    head += f"{len(served) - count} of {len(rows) - len(own)} others."
    table = ["| architecture | `model_type` | computed by | refused because |", "|---|---|---|---|", *map(str, rows)]
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text("\n".join((before + BEGIN, "", head, "", *table, "", END + after)))
    sys.exit(0)


if __name__ == "__main__":
    main()
