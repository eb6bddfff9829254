"""Whisper's decoder over what transformers' encoder made: its texts are those of transformers, whatever the scheduler
does to them."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache as remember
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
    WhisperTimeStampLogitsProcessor,
)
from transformers.generation.logits_process import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor

from charonia.core.errors import InvalidArgument
from charonia.core.resolved_sampling import LogitsParams, ResolvedSampling, TimestampRules
from charonia.engine.checkpoint.encoder_shape import EncoderShape
from charonia.engine.checkpoint.model_spec import CheckpointError
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.encoders.encoder_rows import EncoderRows
from charonia.scheduler.sequence import SequenceSpec

from .test_equality import NEW, SETTINGS, Bench

VOCABULARY, END, NO_TIMESTAMPS = 384, 300, 320
LENGTHS = (3, 1, 20, 40, 3, 17, 5, 33)
"""Of prompts, which say before what has been said."""
FRAMES = 50


class Hearing(NamedTuple):
    directory: Path
    model: Any
    sounds: list[Tensor]
    """What the encoder made, [frames, width] each."""
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Hearing:
    torch.manual_seed(3)
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=FRAMES,
        max_target_positions=256,
        num_mel_bins=16,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=END,
        decoder_start_token_id=301,
        init_std=0.2,
    )
    model = WhisperForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.2)
    directory = tmp_path_factory.mktemp("whisper")
    model.save_pretrained(directory)
    features = torch.randn(len(LENGTHS), 16, 2 * FRAMES)
    with torch.inference_mode():
        encoded = model.model.encoder(features).last_hidden_state
    sounds = [rows[: FRAMES - 7 * (number % 3)].contiguous() for number, rows in enumerate(encoded)]
    sounds[4] = sounds[0]
    prompts = [[301, *torch.randint(1, END, (length,)).tolist()] for length in LENGTHS]
    return Hearing(directory, model, sounds, prompts)


RULES = LogitsParams(
    suppressed=(7, 11), suppressed_first=(5, END), timestamps=TimestampRules(NO_TIMESTAMPS + 1, END, NO_TIMESTAMPS, 9)
)


def theirs(prompt: int) -> list[Any]:
    """Transformers' processors for a prompt of so many tokens."""
    config = GenerationConfig(eos_token_id=END)
    config.no_timestamps_token_id = NO_TIMESTAMPS
    config.max_initial_timestamp_index = 9
    return [
        SuppressTokensAtBeginLogitsProcessor([5, END], prompt),
        SuppressTokensLogitsProcessor([7, 11]),
        WhisperTimeStampLogitsProcessor(config, prompt),
    ]


@torch.inference_mode()
def followed(hearing: Hearing, number: int, text: Sequence[int], ruled: bool) -> list[int]:
    """What transformers chooses greedily after the prompt and after each token of the text."""
    prompt = hearing.prompts[number]
    ids = torch.tensor([[*prompt, *text]])
    rows = hearing.sounds[number].unsqueeze(0)
    logits = hearing.model(encoder_outputs=(rows,), decoder_input_ids=ids).logits[0].float()
    chosen = []
    for at in range(len(prompt), len(prompt) + len(text)):
        scores = logits[at - 1 : at].clone()
        for process in theirs(len(prompt)) if ruled else ():
            scores = process(ids[:, :at], scores)
        chosen.append(int(scores.argmax()))
    return chosen


class HearingBench(Bench):
    hearing: Hearing

    def request(self, cache: KVCacheManager, key: int, prompt: list[int], sampling: ResolvedSampling) -> SequenceSpec:
        rows = self.hearing.sounds[key].numpy().tobytes()
        encoded = EncoderRows(len(self.hearing.sounds[key]), sha256(rows).digest(), rows, "float32")
        spec = SequenceSpec(
            key=key, prompt=np.array(prompt, np.int32), max_tokens=NEW, sampling=sampling, encoded=encoded
        )
        return msgspec.structs.replace(spec, hashes=cache.digest(spec.identities, spec.extras))


@pytest.fixture(scope="module")
def bench(hearing: Hearing) -> Iterator[Callable[[str], HearingBench]]:
    made: list[HearingBench] = []

    @remember
    def make(backend: str) -> HearingBench:
        made.append(HearingBench(hearing.directory, backend))
        made[-1].hearing = hearing
        return made[-1]

    yield make
    for own in made:
        own.executor.close()


SOME = {"auto": ("plain", "everything, ahead 1"), "torch": ("everything, ahead 1",)}
CASES = [
    pytest.param(backend, name, ruled, marks=() if suited else pytest.mark.proof)
    for backend in ("auto", "torch", "reference")
    for name in SETTINGS
    for ruled in (False, True)
    for suited in [name in SOME.get(backend, ()) and ruled == (name != "plain")]
]


@pytest.mark.parametrize(("backend", "setting", "ruled"), CASES)
def test_texts_are_those_of_transformers(
    backend: str, setting: str, ruled: bool, bench: Callable[[str], HearingBench], hearing: Hearing
) -> None:
    sampling = ResolvedSampling(logits=RULES if ruled else None)
    outcome, events = bench(backend).run(SETTINGS[setting], sampling, hearing.prompts)
    for number in range(len(LENGTHS)):
        text = outcome.tokens[number]
        assert len(text) == NEW
        assert text == followed(hearing, number, text, ruled), number
    assert (events.admissions > len(LENGTHS)) == SETTINGS[setting].tight


def test_with_kernels_its_steps_are_one_program(bench: Callable[[str], HearingBench]) -> None:
    bench("auto").run(SETTINGS["plain"], asked=bench("auto").hearing.prompts[:1])
    decoder: Any = bench("auto").executor.rank.runner.computer.decoder
    assert decoder.program is not None
    assert decoder.program.io.logits is not None


IN_INT8 = CacheConfig(block_size=16, dtype="int8")
FEWER_BITS = {
    "cache": {"dtype": "bfloat16", "cache": IN_INT8},
    "products": {"dtype": "float32", "quantization": "int8"},
    "both": {"dtype": "bfloat16", "quantization": "int8", "cache": IN_INT8},
}


@pytest.mark.parametrize("what", FEWER_BITS)
def test_with_fewer_bits_a_token_is_nearly_as_likely(
    what: str, bench: Callable[[str], HearingBench], hearing: Hearing
) -> None:
    """Keys and values of the sound are in eight bits each time: those of int8 products without being told."""
    own = HearingBench(hearing.directory, "auto", how=FEWER_BITS[what])
    own.hearing = hearing
    kept, whole = (one.executor.rank.capacity().cross_bytes for one in (own, bench("auto")))
    assert whole == pytest.approx(3.2 * kept)  # a scale of four bytes for a head of sixteen numbers
    outcome, _ = own.run(SETTINGS["everything, ahead 1"], ResolvedSampling(logprobs=0), hearing.prompts)
    own.executor.close()
    for number, prompt in enumerate(hearing.prompts):
        text = outcome.tokens[number]
        ids = torch.tensor([[*prompt, *text]])
        rows = hearing.sounds[number].unsqueeze(0)
        with torch.inference_mode():
            logits = hearing.model(encoder_outputs=(rows,), decoder_input_ids=ids).logits[0]
        right = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(text)[:, None])[:, 0]
        off = right - torch.tensor([scores.chosen for scores in outcome.logprobs[number]])
        assert off.abs().max() < 1.0, number
        assert off.abs().mean() < 0.15, number


def test_a_sequence_without_a_sound_is_refused(bench: Callable[[str], HearingBench], hearing: Hearing) -> None:
    capacity = bench("auto").executor.rank.capacity()
    encoder = capacity.encoder
    assert encoder == EncoderShape(FRAMES, 64, bins=16)
    assert capacity.cross_bytes > 0
    rows = bytes(4 * 64)
    encoder.check(EncoderRows(1, b"", rows, "float32"))
    encoder.check(encoder.blank())
    for encoded in (None, EncoderRows(2, b"", rows, "float32"), EncoderRows(1, b"", rows, "int8")):
        with pytest.raises(InvalidArgument, match="encoder"):
            encoder.check(encoded)


def test_four_bits_are_refused(hearing: Hearing) -> None:
    config = EngineConfig(model=str(hearing.directory), device="cpu", dtype="bfloat16", quantization="int4")
    executor = InlineExecutor(config)
    with pytest.raises(CheckpointError, match="int8"):
        executor.load(lambda phase, fraction: None)
    executor.close()


def test_more_slots_than_memory_are_refused(hearing: Hearing) -> None:
    scheduler = SchedulerConfig(max_num_seqs=64)
    config = EngineConfig(model=str(hearing.directory), device="cpu", scheduler=scheduler, host_memory=1)
    executor = InlineExecutor(config)
    with pytest.raises(InvalidArgument, match="lower max_num_seqs"):
        executor.load(lambda phase, fraction: None)
    executor.close()
