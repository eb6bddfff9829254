"""docs/architectures.md has every causal language model of transformers, and serves what ever was right."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..proofs.families import ARCHITECTURES, FAMILIES, is_known
from .architecture_table import PAGE, REFUSED, architectures, page_rows


def test_the_page_has_every_architecture() -> None:
    assert [name for name, _ in page_rows()] == [*architectures()]


def test_what_was_right_is_served() -> None:
    ways = dict(page_rows())
    served = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in ARCHITECTURES | FAMILIES if is_known(kind)}
    assert {name for name in served if ways.get(name) == REFUSED} == set()
    assert sum(name.endswith("ForCausalLM") and way != REFUSED for name, way in ways.items()) >= 100


def test_a_refusal_has_a_reason() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if f"| {REFUSED} |" in line]
    assert rows
    assert all(line.split("|")[-2].strip() for line in rows)
