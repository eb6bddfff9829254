"""Pictures of drawn shapes and of digits, with questions about them and the answers.

The handwritten digits are those of scikit-learn (8 x 8 pixels, from the UCI repository); every fifth is held out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits

SHAPES = ("circle", "square", "triangle", "star")
COLOURS = {
    "red": (215, 30, 35),
    "orange": (250, 140, 20),
    "yellow": (245, 215, 30),
    "green": (35, 150, 60),
    "blue": (35, 80, 205),
    "purple": (130, 45, 160),
    "black": (20, 20, 20),
}
LIGHT = ((255, 255, 255), (255, 255, 255), (255, 255, 255), (232, 232, 232), (225, 235, 245), (250, 240, 220))
DARK = (45, 50, 60)
NUMBERS = ("no", "one", "two", "three", "four")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
HELD_OUT_EVERY = 5


@dataclass(frozen=True)
class Shape:
    """What is drawn once. `x`, `y`: its centre, `radius`: half its size, as parts of the picture's sides."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float

    @property
    def place(self) -> str:
        row, column = ROWS[min(int(self.y * 3), 2)], COLUMNS[min(int(self.x * 3), 2)]
        if row == "middle":
            return "in the middle" if column == "middle" else f"on the {column}"
        return f"at the {row}" if column == "middle" else f"at the {row} {column}"

    @property
    def size(self) -> str:
        """Nothing between the two is asked about."""
        return "small" if self.radius < 0.14 else "large" if self.radius > 0.24 else ""


@dataclass(frozen=True)
class Scene:
    """A picture by its contents: shapes, or one digit, or nothing."""

    shapes: tuple[Shape, ...]
    digit: int | None
    image: Image.Image

    def of_kind(self, kind: str) -> list[Shape]:
        return [shape for shape in self.shapes if shape.kind == kind]


@dataclass(frozen=True)
class Exchange:
    """`sort`: what the question is about."""

    question: str
    answer: str
    sort: str


@cache
def handwritten(held_out: bool) -> tuple[list[np.ndarray], list[int]]:
    """Those to learn from or those held out: uint8 [8, 8] each, and which digit it is."""
    digits = load_digits()
    chosen = [index for index in range(len(digits.target)) if (index % HELD_OUT_EVERY == 0) == held_out]
    pixels = np.round(digits.images * 255 / 16).astype(np.uint8)
    return [pixels[index] for index in chosen], [int(digits.target[index]) for index in chosen]


def shade(rng: random.Random, colour: Sequence[int], most: int = 18) -> tuple[int, int, int]:
    red, green, blue = (max(0, min(255, part + rng.randint(-most, most))) for part in colour)
    return (red, green, blue)


def corners(kind: str, x: float, y: float, radius: float, angle: float) -> list[tuple[float, float]]:
    """The polygon of a shape that is no circle."""
    if kind == "square":
        polar = [(1.25, 45 + 90 * corner) for corner in range(4)]
    elif kind == "triangle":
        polar = [(1.15, -90 + 120 * corner) for corner in range(3)]
    else:
        polar = [(1.2 if corner % 2 == 0 else 0.5, -90 + 36 * corner) for corner in range(10)]
    return [
        (
            x + radius * far * math.cos(math.radians(turn + angle)),
            y + radius * far * math.sin(math.radians(turn + angle)),
        )
        for far, turn in polar
    ]


def draw_shapes(rng: random.Random, shapes: Sequence[Shape]) -> Image.Image:
    """The shapes on one background, in a picture that need not be square."""
    width = rng.choice((96, 128, 192))
    height = int(width * rng.choice((1, 1, 1, 0.75, 1.25)))
    dark = rng.random() < 0.15 and all(shape.colour not in ("black", "purple", "blue") for shape in shapes)
    image = Image.new("RGB", (width, height), shade(rng, DARK if dark else rng.choice(LIGHT), 6))
    brush = ImageDraw.Draw(image)
    for shape in shapes:
        x, y, radius = shape.x * width, shape.y * height, shape.radius * min(width, height)
        ink = shade(rng, COLOURS[shape.colour])
        if shape.kind == "circle":
            brush.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
        else:
            brush.polygon(corners(shape.kind, x, y, radius, rng.uniform(-12, 12)), fill=ink)
    return image


def apart(rng: random.Random, count: int) -> list[tuple[float, float, float]]:
    """Places and radii of shapes that do not touch, none on a border between two thirds of the picture."""
    largest = {1: 0.36, 2: 0.25, 3: 0.2, 4: 0.17}[count]
    placed: list[tuple[float, float, float]] = []
    radius = rng.uniform(0.1, largest)
    while len(placed) < count:
        if rng.random() < 0.3:
            radius = rng.uniform(0.1, largest)
        x, y = (rng.uniform(radius * 1.25, 1 - radius * 1.25) for _ in range(2))
        on_border = any(abs(part - border) < 0.035 for part in (x, y) for border in (1 / 3, 2 / 3))
        free = all(math.hypot(x - at, y - height) > 1.3 * (radius + other) for at, height, other in placed)
        if free and not on_border:
            placed.append((x, y, radius))
        elif rng.random() < 0.1:
            radius *= 0.85
    return placed


def shape_scene(rng: random.Random) -> Scene:
    """One shape, several of a kind, or several of two kinds."""
    count = rng.choice((1, 1, 1, 2, 2, 3, 3, 4))
    kinds = rng.sample(SHAPES, 2)
    colours = rng.sample(sorted(COLOURS), 3)
    alike = rng.random() < 0.45
    shapes = []
    for index, (x, y, radius) in enumerate(apart(rng, count)):
        kind = kinds[0] if alike else kinds[index % 2]
        colour = colours[0] if alike and rng.random() < 0.9 else colours[index % 3]
        shapes.append(Shape(kind, colour, x, y, radius))
    return Scene(tuple(shapes), None, draw_shapes(rng, shapes))


def digit_scene(rng: random.Random, held_out: bool) -> Scene:
    """A handwritten digit, or a printed one, in ink on paper, anywhere near the middle."""
    side = rng.choice((64, 96, 128))
    dark = rng.random() < 0.3
    paper = (0, 0, 0) if dark else rng.choice(LIGHT)
    ink = shade(rng, (235, 235, 235) if dark else COLOURS[rng.choice(("black", "black", "black", "blue", "red"))])
    size = int(side * rng.uniform(0.55, 1.0))
    if rng.random() < 0.75:
        drawn, targets = handwritten(held_out)
        index = rng.randrange(len(drawn))
        digit = targets[index]
        scaling = rng.choice((Image.Resampling.NEAREST, Image.Resampling.BICUBIC))
        mask = Image.fromarray(drawn[index]).resize((size, size), scaling)
    else:
        digit = rng.randrange(10)
        mask = Image.new("L", (size, size))
        font = ImageFont.load_default(size * rng.uniform(0.75, 1.0))
        ImageDraw.Draw(mask).text((size / 2, size / 2), str(digit), fill=255, font=font, anchor="mm")
    mask = mask.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR)
    image = Image.new("RGB", (side, side), paper)
    image.paste(Image.new("RGB", (size, size), ink), (rng.randint(0, side - size), rng.randint(0, side - size)), mask)
    return Scene((), digit, image)


def draw_scene(rng: random.Random, held_out: bool = False) -> Scene:
    chance = rng.random()
    if chance < 0.35:
        return digit_scene(rng, held_out)
    return Scene((), None, draw_shapes(rng, ())) if chance < 0.37 else shape_scene(rng)


def counted(count: int, kind: str) -> str:
    return f"{NUMBERS[count]} {kind}" + ("" if count == 1 else "s")


def listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] == "o" else f"a {noun}"


def describe(scene: Scene) -> str:
    if scene.digit is not None:
        return f"The picture shows the digit {scene.digit}."
    if not scene.shapes:
        return "The picture is empty."
    groups: dict[tuple[str, str], int] = {}
    for shape in scene.shapes:
        groups[shape.colour, shape.kind] = groups.get((shape.colour, shape.kind), 0) + 1
    order = sorted(groups.items(), key=lambda item: (-item[1], SHAPES.index(item[0][1]), item[0][0]))
    things = [
        article(f"{colour} {kind}") if count == 1 else counted(count, kind).replace(" ", f" {colour} ", 1)
        for (colour, kind), count in order
    ]
    return f"The picture shows {listed(things)}."


DESCRIBE = (
    "What is in the picture?",
    "What is in this picture?",
    "What do you see?",
    "Describe the picture.",
    "What does the picture show?",
    "What is this?",
    "What is in the image?",
    "Describe this image.",
)
COLOUR = (
    "What colour is the {}?",
    "What color is the {}?",
    "Which colour does the {} have?",
    "Which colour is the {}?",
)
COUNT = ("How many {} are there?", "How many {} are in the picture?", "How many {} do you see?", "Count the {}.")
PLACE = ("Where is the {}?", "Where in the picture is the {}?")
THERE = ("Is there {} in the picture?", "Is there {}?", "Do you see {}?", "Can you see {}?")
SIZE = ("How large is the {}?", "How big is the {}?", "Is the {} small or large?", "What size is the {}?")
BY_COLOUR = ("Which shape is {}?", "What is {}?", "What shape is the {} one?")
DIGIT = (
    "Which digit is this?",
    "What digit is this?",
    "Which number is this?",
    "What number do you see?",
    "Which digit is in the picture?",
    "Read the digit.",
)


def about_one(rng: random.Random, scene: Scene, kind: str) -> list[Exchange]:
    """Questions about a shape that is there once."""
    [shape] = scene.of_kind(kind)
    exchanges = [
        Exchange(rng.choice(COLOUR).format(kind), f"The {kind} is {shape.colour}.", "colour"),
        Exchange(rng.choice(PLACE).format(kind), f"The {kind} is {shape.place}.", "place"),
    ]
    if shape.size:
        exchanges.append(Exchange(rng.choice(SIZE).format(kind), f"The {kind} is {shape.size}.", "size"))
    if [other.colour for other in scene.shapes].count(shape.colour) == 1:
        question = rng.choice(BY_COLOUR).format(shape.colour)
        exchanges.append(Exchange(question, f"The {kind} is {shape.colour}.", "shape"))
    return exchanges


def about_number(rng: random.Random, count: int, noun: str) -> Exchange:
    answer = f"There {'is' if count == 1 else 'are'} {counted(count, noun)}."
    return Exchange(rng.choice(COUNT).format(f"{noun}s"), answer, "number")


def exchanges_about(rng: random.Random, scene: Scene) -> list[Exchange]:
    """One of every sort of question that the scene has an answer to, the description first."""
    present = sorted({shape.kind for shape in scene.shapes})
    absent = [kind for kind in SHAPES if kind not in present]
    digit = f"This is the digit {scene.digit}." if scene.digit is not None else "There is no digit in the picture."
    some = rng.choice(present) if present and rng.random() < 0.8 else rng.choice(absent)
    sought = rng.choice(present) if present and rng.random() < 0.5 else rng.choice(absent)
    missing = rng.choice(absent)
    said = f"Yes, there is {article(sought)}." if sought in present else f"No, there is no {sought}."
    exchanges = [
        Exchange(rng.choice(DESCRIBE), describe(scene), "description"),
        Exchange(rng.choice(DIGIT), digit, "digit"),
        about_number(rng, len(scene.of_kind(some)), some),
        about_number(rng, len(scene.shapes), "shape"),
        Exchange(rng.choice(THERE).format(article(sought)), said, "presence"),
        Exchange(rng.choice((*COLOUR, *PLACE)).format(missing), f"There is no {missing} in the picture.", "presence"),
    ]
    for kind in present:
        if len(scene.of_kind(kind)) == 1:
            exchanges.extend(about_one(rng, scene, kind))
    return exchanges


def chosen_exchanges(rng: random.Random, scene: Scene, count: int) -> list[Exchange]:
    """Some of the questions, those about what is there before those about what is not."""
    exchanges = exchanges_about(rng, scene)
    weights = [0.35 if "no " in exchange.answer else 1.0 for exchange in exchanges]
    keys = {index: rng.random() ** (1 / weight) for index, weight in enumerate(weights)}
    return [exchanges[index] for index in sorted(keys, key=keys.__getitem__, reverse=True)[:count]]
