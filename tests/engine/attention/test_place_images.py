"""An image is what a place has, and another rank's cache has the same when it has landed."""

import torch
from torch import Tensor

from charonia.engine.attention.place_images import PlaceImages


def tensors(places: int) -> list[Tensor]:
    """Codes, scales and numbers, one of them with places that are not neighbours in memory."""
    torch.manual_seed(places)
    codes = torch.randint(-128, 128, (3, places, 2, 7), dtype=torch.int8).transpose(0, 1)
    numbers = torch.randn(places, 5).to(torch.bfloat16)
    floats = torch.randn(places, 2, 3).to(torch.float8_e4m3fn)
    return [codes, torch.randn(places, 1, 2), numbers, floats]


def test_a_place_comes_back_bit_for_bit_elsewhere() -> None:
    ours, theirs = tensors(4), tensors(6)
    mine, other = PlaceImages(ours), PlaceImages(theirs)
    assert mine.layout == other.layout == "int8[3, 2, 7] float32[1, 2] bfloat16[5] float8_e4m3fn[2, 3]"
    assert mine.bytes == other.bytes == 48 + 16 + 16 + 16
    untouched = [tensor[4].clone() for tensor in theirs]
    sent = mine.take(2)
    kept = [tensor[2].clone() for tensor in ours]
    for tensor in ours:
        tensor[2] = 0  # it may be overwritten at once
    landing = other.make()
    landing.numpy()[:] = sent.read()
    other.put(landing, 5)
    assert all(tensor[5].equal(was) for tensor, was in zip(theirs, kept, strict=True))
    assert all(tensor[4].equal(was) for tensor, was in zip(theirs, untouched, strict=True))


def test_equal_places_have_equal_images() -> None:
    images = PlaceImages(tensors(3))
    assert images.take(1).read().tobytes() == images.take(1).read().tobytes()
    assert images.take(1).read().tobytes() != images.take(2).read().tobytes()
