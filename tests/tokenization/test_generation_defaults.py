import json
from pathlib import Path

import pytest

from charonia.core.errors import InvalidArgument
from charonia.tokenization.generation_defaults import GenerationDefaults, read_generation_defaults
from charonia.tokenization.tokenizer import Tokenizer


def defaults(checkpoint: Path, **files: object) -> GenerationDefaults:
    for name, content in files.items():
        (checkpoint / f"{name}.json").write_text(json.dumps(content))
    return read_generation_defaults(checkpoint, Tokenizer.load(checkpoint))


def test_eos_comes_from_the_first_file_that_names_it_and_from_the_tokenizer(checkpoint: Path) -> None:
    assert defaults(checkpoint).eos == (1,)
    assert defaults(checkpoint, config={"eos_token_id": 7}).eos == (7, 1)
    assert defaults(checkpoint, generation_config={"eos_token_id": [7, 9]}).eos == (7, 9, 1)
    assert defaults(checkpoint, generation_config={"eos_token_id": [1, 9]}).eos == (1, 9)
    assert defaults(checkpoint, generation_config={"eos_token_id": []}).eos == (1,)


def test_a_tokenizers_eos_ends_no_text_of_a_decoder_beside_an_encoder(checkpoint: Path) -> None:
    assert defaults(checkpoint, config={"is_encoder_decoder": True}).eos == (1,)
    assert defaults(checkpoint, config={"is_encoder_decoder": True, "eos_token_id": 7}).eos == (7,)


def test_sampling_defaults_come_from_the_model(checkpoint: Path) -> None:
    assert defaults(checkpoint)[1:] == (1.0, 0, 1.0, 0.0, 1.0, (), ())
    wanted = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    assert defaults(checkpoint, generation_config=wanted)[1:] == (0.6, 20, 0.9, 0.1, 1.1, (), ())
    assert defaults(checkpoint, generation_config={"do_sample": False}).temperature == 0.0


@pytest.mark.parametrize(
    "content",
    [{"temperature": "hot"}, {"top_k": [1]}, {"top_k": 1e400}, {"eos_token_id": "</s>"}, {"eos_token_id": [None]}],
)
def test_what_is_no_number_is_refused_when_it_is_read(checkpoint: Path, content: object) -> None:
    with pytest.raises(InvalidArgument, match=r"generation_config\.json.*wrong kind"):
        defaults(checkpoint, generation_config=content)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"top_p": 7}, "top_p must be above 0 and at most 1, got 7.0"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"top_k": -2}, "top_k must be"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number above 0"),
    ],
)
def test_what_no_request_might_ask_for_is_refused_by_file_and_name(
    checkpoint: Path, content: object, says: str
) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        defaults(checkpoint, generation_config=content)
    assert refusal.value.message.startswith(f"{checkpoint / 'generation_config.json'}: {says}")


def test_an_end_that_the_model_cannot_write_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = GenerationDefaults((1, 400, -1), temperature=0.5)
    assert model.limited_to(400) == GenerationDefaults((1,), temperature=0.5)
    assert "eos_token_id 400, -1 is outside the vocabulary of 400 tokens" in caplog.text
    caplog.clear()
    assert model.limited_to(401).limited_to(401).eos == (1, 400)
    assert caplog.text.count("outside") == 1


def test_a_decoder_begins_as_its_files_say(checkpoint: Path) -> None:
    """Those of models whose encoder reads the prompt."""
    config = {"is_encoder_decoder": True, "decoder_start_token_id": 2}
    generation = {"forced_bos_token_id": 9, "suppress_tokens": [4, -1], "bad_words_ids": [[6], [7, 8]]}
    read = defaults(checkpoint, config=config, generation_config=generation)
    assert (read.decoder_start, read.suppressed) == ((2, 9), (4, 6))
    with pytest.raises(InvalidArgument, match="decoder_start_token_id"):
        defaults(checkpoint, generation_config={"decoder_start_token_id": "two"})
