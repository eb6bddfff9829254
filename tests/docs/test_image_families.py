"""docs/architectures.md has every family of transformers' models of images and texts, and says what becomes of it."""

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES

from charonia.core.media_models import SEEING_FAMILIES

from ..proofs.image_families import BEGIN, END, FOREIGN, NATIVE, PAGE, verdict

TABLE = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
ROWS = {line.split("`")[1]: line for line in TABLE.splitlines() if line.startswith("| `")}
OTHERS = sorted(CLASSES.keys() - SEEING_FAMILIES)
COMPARED = {"aria", "aya_vision", "cohere2_vision", "deepseek_ocr2", "hyperclovax_vision_v2", "lfm3_vl"}


def test_the_page_has_every_family() -> None:
    assert [*ROWS] == sorted(CLASSES)
    assert all(f"| {NATIVE} |" in ROWS[family] for family in SEEING_FAMILIES & CLASSES.keys())
    assert all(f"| {FOREIGN} |" in ROWS[family] for family in COMPARED)


def test_what_is_not_served_has_a_reason() -> None:
    for line in ROWS.values():
        _, _, images, _, _, reason, _ = line.split("|")
        assert (images.strip() == "yes") == (not reason.strip()), line


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", OTHERS)
def test_it_says_what_becomes_of_them(family: str) -> None:
    transformers.logging.set_verbosity_error()
    assert str(verdict(family)) == ROWS[family]
