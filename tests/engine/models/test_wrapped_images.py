"""Models of images and texts that have no description, through their own processors and towers: logits and greedy
tokens are those of transformers' whole models from pixels, whether prompts are cut or found again, and whether their
language part is one of ours or transformers'."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from charonia.classic_backends.tower.tower import Tower
from charonia.classic_backends.tower.tower_files import read_tower_files
from charonia.core.media import PreparedMedium
from charonia.core.media_models import EncodedMedium
from charonia.engine.client.model_media import PromptMedia
from charonia.engine.core.messages import AddRequest
from charonia.media.processor import ImageProcessor
from charonia.scheduler.encoders.encoder_rows import EmbeddedSpan
from charonia.scheduler.sequence import SequenceSpec
from charonia.tokenization.media_text import MediaText
from charonia.tokenization.tokenizer import Tokenizer
from tests.seeing_models import picture, write_seeing

from .test_equality import BLOCK, Setting
from .test_image_spans import LARGEST_ERROR, SETTINGS, ImageBench, draw

OURS = (
    "deepseek-vl", "exaone4.5", "got-ocr2", "janus", "lighton-ocr", "llava-next-video", "llava-onevision",
    "qianfan-ocr", "video-llama-3", "vipllava",
)  # fmt: skip
FOREIGN = (
    "aria", "aya-vision", "cohere2-vision", "deepseek-ocr2", "dots3-note", "hyperclovax-vision", "lfm3-vl",
    "mistral-large4",
)  # fmt: skip
PIXELS = (((90, 50), (60, 120)), ((60, 120), (90, 50)), ((60, 120), (120, 90)))
"""Width and height of the images of prompts."""
LARGE = ((90, 50), (800, 120))
"""Of which the second is cut into tiles by a processor that begins with large ones."""
TEXTS = ((5, 7, 9), (3, 20, 1), (3, 20, 30))
"""Tokens before, between and behind the images; the last two prompts begin alike, and with the same image."""


class WrappedPrompt(NamedTuple):
    """A prompt with two images: an `ImagePrompt` whose images are a processor's."""

    tokens: list[int]
    spans: tuple[EmbeddedSpan, ...]
    features: dict[str, Tensor]
    """What the whole model is called with."""


class Wrapped:
    """A checkpoint with all that makes prompts of pictures, and transformers' model of it."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = write_seeing(directory, name)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        self._processor = ImageProcessor(directory)
        self._tower = Tower(read_tower_files(directory, "auto"), "cpu", together=False)
        self._tokenizer = Tokenizer.load(directory)

    def prompt(self, texts: Sequence[list[int]], sizes: Sequence[tuple[int, int]]) -> WrappedPrompt:
        images = [Image.fromarray(picture(*size, seed)) for seed, size in enumerate(sizes)]
        processed = [self._processor.process(image) for image in images]
        prepared = [
            PreparedMedium("image", repr(size).encode(), medium.placeholder, medium.inputs, medium.grid)
            for size, medium in zip(sizes, processed, strict=True)
        ]
        encoded = [
            EncodedMedium(len(rows), rows.numpy().tobytes(), "float32")
            for rows, _ in self._tower.encode([medium.inputs for medium in processed])
        ]
        tokens = list(texts[0])
        for medium, text in zip(processed, texts[1:], strict=True):
            tokens += [*self._tokenizer.encode(medium.placeholder, special=False), *text]
        place = self._processor.token_ids[0]
        media = PromptMedia(MediaText({}, ()), {"image": place}, prepared, encoded)
        bare = AddRequest(SequenceSpec(key=0, prompt=np.array(tokens, np.int32), max_tokens=1))
        options: Any = {"return_tensors": "pt", "padding": False}
        whole = self._processor._processor(images=images, text=[2 * self._processor.token], **options)
        features = {name: whole[name] for name in processed[1].inputs}
        return WrappedPrompt(tokens, media.place(bare, "").spec.embedded, features)

    @torch.inference_mode()
    def logits(self, prompt: WrappedPrompt, following: Sequence[int] = ()) -> Tensor:
        """Transformers' logits [places, vocabulary] of the prompt and tokens after it, from pixels."""
        ids = torch.tensor([[*prompt.tokens, *following]])
        logits: Tensor = self.model(input_ids=ids, **prompt.features, use_cache=False).logits[0]
        return logits

    def exact_logits(self, prompt: WrappedPrompt) -> Tensor:
        """The same, but that the rows of images come from a model in double precision."""
        whole = deepcopy(self.model.model).double()
        whole.set_experts_implementation("eager")  # others have no double precision

        def features(*inputs: Any, **named: Any) -> Any:
            made = whole.get_image_features(*map(widened, inputs), **{name: widened(x) for name, x in named.items()})
            rows = made.pooler_output
            made.pooler_output = rows.float() if isinstance(rows, Tensor) else [part.float() for part in rows]
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.model.model, "get_image_features", features)
            return self.logits(prompt)

    def is_place(self, token: int) -> bool:
        return token == self._processor.token_ids[0]


def widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def texts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [draw(length, generator) for length in lengths]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*OURS, *FOREIGN])
def test_logits_are_those_from_pixels(tmp_path: Path, name: str) -> None:
    """In one step, and in steps that end within images and right behind them. What a tower rounds may grow on its way
    to the logits: in transformers' own as much as here."""
    wrapped = Wrapped(tmp_path, name)
    bench = ImageBench(tmp_path, "native")
    sizes = LARGE if name == "deepseek-ocr2" else PIXELS[0]
    prompt: Any = wrapped.prompt(texts(TEXTS[0], 5), sizes)
    right = wrapped.exact_logits(prompt)
    most = LARGEST_ERROR * right.std() + 2 * (wrapped.logits(prompt) - right).abs().max()
    first, *_, last = prompt.spans
    cuts = sorted({first.start + 1, first.end, last.start, last.end - 1, last.end})
    for logits in (bench.logits(prompt), bench.logits(prompt, cuts)):
        assert (logits - right).abs().max() < most
    bench.executor.close()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", [name for name in (*OURS, *FOREIGN) if name != "deepseek-ocr2"])
def test_greedy_tokens_are_those_from_pixels(tmp_path: Path, name: str) -> None:
    """The images of a prompt are found again where another begins with them, and after it was preempted."""
    wrapped = Wrapped(tmp_path, name)
    bench = ImageBench(tmp_path, "native")
    beginning = texts((3,), 9)[0]
    drawn = [texts(lengths, 5 + number) for number, lengths in enumerate(TEXTS)]
    drawn[1][0] = drawn[2][0] = beginning
    drawn[2][1] = drawn[1][1]
    prompts: Any = [wrapped.prompt(own, sizes) for own, sizes in zip(drawn, PIXELS, strict=True)]
    bench.asked = prompts * 3
    bench.longest = max(256, *(len(prompt.tokens) + 64 for prompt in prompts))
    for setting in (Setting(), *SETTINGS.values()):
        result, events = bench.run(setting, asked=[prompt.tokens for prompt in bench.asked])
        for key, prompt in enumerate(prompts):
            tokens = result.tokens[key]
            ends = [index for index, token in enumerate(tokens) if wrapped.is_place(token)]  # an image to transformers
            said = tokens[: min([len(tokens), *(end + 1 for end in ends)])]
            logits = wrapped.logits(prompt, said[:-1])[len(prompt.tokens) - 1 :]
            assert said == logits.argmax(-1).tolist(), (setting, key)
            assert [tokens] * 2 == [result.tokens[key + times * len(prompts)] for times in (1, 2)], (setting, key)
        found = sum(result.cached[key] for key in range(len(prompts), len(bench.asked)))
        assert setting.tight or not setting.prefix or found >= BLOCK, setting
        assert events.unfinished_chunks or setting.chunk > 256
    bench.executor.close()
