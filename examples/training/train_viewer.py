"""Trains the viewer, a small Llava checkpoint, on pictures and questions drawn as it goes, within a time budget.

Its tower, SigLIP's architecture, learns first what stands at each of an image's places, then both parts to answer.
Several questions about a picture stand in one row: half of the rows hide them from one another, as if each were asked
alone, and in the others they are the turns of one chat, with a second picture further on.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from scenes import COLOURS, SHAPES, Scene, chosen_exchanges, draw_scene
from tokenize_corpus import CHAT_TEMPLATE
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from train import BF16_IS_FAST, KEEP_SECONDS, Plan, add_run_options, optimizers, update
from transformers import GenerationConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

MODELS = Path(__file__).parents[1] / "model_repository"
SIDE, PATCH = 48, 8
GRID = SIDE // PATCH
PLACES = GRID * GRID
IMAGE = "<image>"
USER, ASSISTANT, END, END_OF_TEXT, IMAGE_ID, VOCABULARY = 2, 3, 4, 0, 4096, 4104
PART = "{%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}"
TEMPLATE = CHAT_TEMPLATE.replace(
    PART,
    "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}"
    + IMAGE
    + "{%- endif -%}{%- endfor -%}"
    + PART,
)
"""The demo's, with the images of a message before its texts."""


def new_model() -> LlavaForConditionalGeneration:
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=3,
        intermediate_size=448,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[END_OF_TEXT, END],
        pad_token_id=END_OF_TEXT,
    )
    tower = SiglipVisionConfig(
        hidden_size=128,
        num_hidden_layers=4,
        intermediate_size=512,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    config = LlavaConfig(
        text_config=text,
        vision_config=tower,
        image_token_index=IMAGE_ID,
        image_seq_length=PLACES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


class Segment(NamedTuple):
    """A part of a row: a picture, or a question about it with its answer."""

    ids: list[int]
    learnt: int
    """How many of the last tokens are to be predicted: those of an answer."""
    picture: int
    question: int
    """0: the picture itself, which all questions about it see."""


class Rows:
    """Rows of two pictures each, as the model takes them."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random, questions: int) -> None:
        self._tokenizer, self._rng, self._questions = tokenizer, rng, questions

    def batch(self, scenes: Sequence[Scene]) -> dict[str, Tensor]:
        rows = [self._row(scenes[first : first + 2], self._rng.random() < 0.5) for first in range(0, len(scenes), 2)]
        longest = -(-max(len(ids) for ids, *_ in rows) // 32) * 32
        ids, positions, learnt = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(3))
        seen = torch.eye(longest, dtype=torch.bool).repeat(len(rows), 1, 1, 1)
        for row, (tokens, places, answers, mask) in enumerate(rows):
            length = len(tokens)
            ids[row, :length], positions[row, :length] = torch.tensor(tokens), torch.tensor(places)
            learnt[row, :length] = torch.tensor(answers)
            seen[row, 0, :length, :length] = torch.from_numpy(mask)
        return {"input_ids": ids, "position_ids": positions, "learnt": learnt.bool(), "attention_mask": seen}

    def _row(self, scenes: Sequence[Scene], chat: bool) -> tuple[list[int], list[int], list[bool], np.ndarray]:
        segments = [segment for number, scene in enumerate(scenes) for segment in self._segments(scene, number, chat)]
        ids = [token for segment in segments for token in segment.ids]
        starts = [0 if chat or segment.question == 0 else 1 + PLACES for segment in segments]
        positions = [
            start + at for segment, start in zip(segments, starts, strict=True) for at in range(len(segment.ids))
        ]
        learnt = [at >= len(segment.ids) - segment.learnt for segment in segments for at in range(len(segment.ids))]
        picture, question = (np.array([segment[part] for segment in segments for _ in segment.ids]) for part in (2, 3))
        seen = (picture[:, None] == picture) & ((question == 0) | (question[:, None] == question))
        return ids, [*range(len(ids))] if chat else positions, learnt, np.tril(seen | chat)

    def _segments(self, scene: Scene, picture: int, chat: bool) -> Iterator[Segment]:
        yield Segment([USER, *[IMAGE_ID] * PLACES], 0, picture, 0)
        for number, exchange in enumerate(chosen_exchanges(self._rng, scene, self._questions), 1):
            question, answer = (self._tokenizer.encode(text).ids for text in (exchange.question, exchange.answer))
            begin = [USER] if chat and number > 1 else []
            yield Segment([*begin, *question, END, ASSISTANT, *answer, END], len(answer) + 1, picture, number)


def pixels_of(scenes: Sequence[Scene]) -> Tensor:
    """float32 [scenes, 3, SIDE, SIDE] from -1 to 1, as the checkpoint's processor makes them."""
    images = [scene.image.resize((SIDE, SIDE), Image.Resampling.BICUBIC) for scene in scenes]
    stacked = np.stack([np.asarray(image, np.float32) for image in images])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2) / 127.5 - 1


def things_of(scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
    """int64 [scenes, PLACES], the shape whose centre is at each place, and [scenes], the digit; 0 is none."""
    things, digits = torch.zeros(len(scenes), PLACES, dtype=torch.long), torch.zeros(len(scenes), dtype=torch.long)
    for index, scene in enumerate(scenes):
        digits[index] = 0 if scene.digit is None else 1 + scene.digit
        for shape in scene.shapes:
            thing = 1 + SHAPES.index(shape.kind) * len(COLOURS) + sorted(COLOURS).index(shape.colour)
            things[index, int(shape.y * GRID) * GRID + int(shape.x * GRID)] = thing
    return things, digits


class Learner(nn.Module):
    """The model, and what teaches its tower: classifiers of places and of whole images, which are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.viewer = new_model()
        width = self.viewer.config.vision_config.hidden_size
        self.things = nn.Linear(width, 1 + len(SHAPES) * len(COLOURS))
        self.digits = nn.Linear(width, 11)

    def tower_loss(self, features: Tensor, scenes: Sequence[Scene]) -> Tensor:
        things, digits = things_of(scenes)
        at_places = functional.cross_entropy(self.things(features).flatten(0, 1).float(), things.flatten())
        return 4 * at_places + functional.cross_entropy(self.digits(features.mean(1)).float(), digits)

    def answer_loss(self, features: Tensor, batch: dict[str, Tensor]) -> Tensor:
        model = self.viewer.model
        ids, learnt = batch["input_ids"], batch["learnt"]
        places = ids == IMAGE_ID
        rows = model.multi_modal_projector(features).flatten(0, 1)
        embeddings = model.language_model.embed_tokens(torch.where(places, 0, ids)).to(rows.dtype)
        embeddings = embeddings.masked_scatter(places[..., None], rows)
        states = model.language_model(
            inputs_embeds=embeddings,
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
            use_cache=False,
        ).last_hidden_state
        before = learnt.roll(-1, 1)  # no row begins with an answer
        return functional.cross_entropy(self.viewer.lm_head(states[before]).float(), ids[learnt])

    def forward(
        self, scenes: Sequence[Scene], batch: dict[str, Tensor] | None, fixed: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The losses of the tower, and of the answers where there is a batch of them. `fixed`: only the classifiers
        learn."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=BF16_IS_FAST):
            with torch.set_grad_enabled(not fixed):
                features = self.viewer.model.vision_tower(pixels_of(scenes)).last_hidden_state
            return self.tower_loss(features, scenes), None if batch is None else self.answer_loss(features, batch)


def write_tokenizer(folder: Path) -> Tokenizer:
    """The demo's, with a token for an image's places."""
    demo = MODELS / "demo" / "1"
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True)])
    assert tokenizer.token_to_id(IMAGE) == IMAGE_ID
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((demo / "tokenizer_config.json").read_text())
    config["extra_special_tokens"] = {"image_token": IMAGE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer


def write_processor(folder: Path) -> None:
    image = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "resample": int(Image.Resampling.BICUBIC),
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    places = {"patch_size": PATCH, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2) + "\n")
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "LlavaProcessor", "image_token": IMAGE, **places}, indent=2) + "\n"
    )


def save(viewer: LlavaForConditionalGeneration, folder: Path) -> None:
    rounded = new_model().bfloat16()
    rounded.load_state_dict({name: value.to(torch.bfloat16) for name, value in viewer.state_dict().items()})
    rounded.generation_config = GenerationConfig(eos_token_id=[END_OF_TEXT, END], pad_token_id=END_OF_TEXT)
    rounded.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


class Course:
    """One training run and how far it has come. `begun_with`: a checkpoint to go on from, whose tower has learnt."""

    def __init__(
        self, tokenizer: Tokenizer, plan: Plan, tower_share: float, scenes: int, seed: int, begun_with: Path | None
    ) -> None:
        self.plan, self.tower_share, self.scenes = plan, tower_share, scenes
        self.learner = Learner()
        self.goes_on = begun_with is not None
        if begun_with is not None:
            former = LlavaForConditionalGeneration.from_pretrained(begun_with, dtype=torch.float32)
            self.learner.viewer.load_state_dict(former.state_dict())
        self.tools = optimizers(self.learner, plan)
        self.rng = random.Random(seed)
        self.rows = Rows(tokenizer, self.rng, questions=4)
        self.steps = 0
        self.losses = [0.0, 0.0]
        self.begun = time.monotonic()

    @property
    def progress(self) -> float:
        return max(self.steps / self.plan.steps, (time.monotonic() - self.begun) / 60 / self.plan.minutes)

    def advance(self) -> None:
        progress = self.progress
        scenes = [draw_scene(self.rng) for _ in range(self.scenes)]
        first = progress <= self.tower_share
        of_tower, of_answers = self.learner(
            scenes, None if first else self.rows.batch(scenes), fixed=first and self.goes_on
        )
        loss = of_tower if of_answers is None else 0.3 * of_tower + of_answers
        loss.backward()
        nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        update(self.tools, self.plan.rate(progress))
        self.steps += 1
        for index, value in enumerate((of_tower, of_answers)):
            if value is not None:
                self.losses[index] += (0.05 if self.losses[index] else 1) * (float(value.detach()) - self.losses[index])

    def describe(self) -> str:
        pace = self.steps * self.scenes / (time.monotonic() - self.begun)
        tower, answers = self.losses
        return f"step {self.steps} {self.progress:.1%} tower {tower:.3f} answers {answers:.4f} {pace:.0f} pictures/s"


def train(course: Course, folder: Path) -> None:
    kept = time.monotonic()
    while course.progress < 1:
        course.advance()
        if course.steps % 50 == 0:
            print(course.describe(), flush=True)
        if time.monotonic() - kept > KEEP_SECONDS:
            save(course.learner.viewer, folder)
            kept = time.monotonic()
    save(course.learner.viewer, folder)
    print(course.describe(), flush=True)


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODELS / "viewer" / "1", help="folder of the checkpoint")
    parser.add_argument("--begin", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--pictures", type=int, default=64, help="of a step")
    parser.add_argument(
        "--tower-share", type=float, default=0.2, help="of the time, for the tower, or its classifiers, alone"
    )
    add_run_options(parser, minutes=40.0, matrix_rate=4e-3, other_rate=2e-3, seed=20261129)
    return parser.parse_args()


def main() -> None:
    options = options_of()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(options.out)
    write_processor(options.out)
    plan = Plan(options.steps, options.minutes, options.pictures, options.matrix_rate, options.other_rate)
    train(Course(tokenizer, plan, options.tower_share, options.pictures, options.seed, options.begin), options.out)


if __name__ == "__main__":
    main()
