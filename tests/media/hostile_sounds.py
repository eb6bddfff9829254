"""Files that are no sounds, or not those that they say they are: what strangers send."""

import struct
from collections.abc import Iterator
from random import Random

import numpy as np

from .hostile_files import HostileFile, archive, good_files, mixed
from .sounds import CODECS, film, sound_file, tones, wav

SECONDS = 0.6


def good_sounds() -> dict[str, bytes]:
    rates = {form: 48_000 if codec == "libopus" else 16_000 for form, (_, codec, _) in CODECS.items()}
    return {form: sound_file(form, tones(SECONDS, rate=rate), rate) for form, rate in rates.items()}


def hostile_sounds() -> Iterator[HostileFile]:
    """More than 200 of them, the same each time."""
    random, good = Random(11), good_sounds()
    for form, data in good.items():
        for cut in {1, 8, 20, *(len(data) * part // 8 for part in range(1, 8)), len(data) - 9, len(data) - 1}:
            yield HostileFile(f"{form}, cut off at {cut}", data[:cut])
        for number in range(6):
            torn = bytearray(data)
            for _ in range(1 + 2 * number):
                torn[random.randrange(min(len(torn), 400 if number % 2 else len(torn)))] ^= 1 << random.randrange(8)
            yield HostileFile(f"{form}, torn {number}", bytes(torn))
        yield from mixed(form, data)
        yield HostileFile(f"{form}, twice", data + data)
    yield from lying_heads(good)
    yield from bombs()
    for name, data in {
        "nothing but zeros": bytes(500),
        "noise": random.randbytes(5000),
        "a text": b"a sound " * 90,
        "an archive": archive(),
        "a program": b"\x7fELF" + bytes(200),
        "a film without sound": film(),
        "a playlist that names a file": b"#EXTM3U\n#EXT-X-VERSION:3\n#EXTINF:1,\nfile:///etc/passwd\n",
        "a list of files": b"ffconcat version 1.0\nfile /etc/passwd\n",
        "a playlist behind tags": b"ID3\4\0\0\0\0\0\0#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/\n",
        "a head of RIFF alone": b"RIFF\xff\xff\xff\xffWAVE",
        "a head of Ogg alone": b"OggS",
        "a head of MP4 alone": b"\0\0\0\x18ftypM4A ",
        "a head of WebM alone": b"\x1aE\xdf\xa3",
        "a head of MP3 alone": b"\xff\xfb\x90\x00",
        "tags alone": b"ID3\4\0\0\0\0\x7f\x7f" + bytes(300),
    }.items():
        yield HostileFile(name, data)
    for form, data in good_files().items():
        yield HostileFile(f"a picture: {form}", data)


def lying_heads(good: dict[str, bytes]) -> Iterator[HostileFile]:
    """Files whose heads say something else than what follows."""
    data = good["wav"]
    fields = {"format": (20, "<H"), "channels": (22, "<H"), "rate": (24, "<I"), "width": (34, "<H"), "size": (40, "<I")}
    place = data.index(b"data") + 4
    for name, (offset, layout) in fields.items():
        for value in (0, 1, 3, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF):
            head = bytearray(data)
            most = (1 << 8 * struct.calcsize(layout)) - 1
            struct.pack_into(layout, head, place if name == "size" else offset, min(value, most))
            yield HostileFile(f"wav, {name} is {min(value, most)}", bytes(head))
    data = good["flac"]
    for value in (0, 1, 2**35, 2**36 - 1):
        head = bytearray(data)
        head[21] = head[21] & 0xF0 | value >> 32
        struct.pack_into(">I", head, 22, value & 0xFFFFFFFF)
        yield HostileFile(f"flac, said to have {value} samples", bytes(head))
    for form, tag in (("m4a", b"stsz"), ("m4a", b"stco"), ("m4a", b"stts"), ("m4a", b"mdhd"), ("m4a-alac", b"stsc")):
        for value in (0, 0x7FFFFFFF, 0xFFFFFFFF):
            head = bytearray(good[form])
            struct.pack_into(">I", head, head.index(tag) + 12, value)
            yield HostileFile(f"{form}, {tag.decode()} is {value}", bytes(head))


def bombs() -> Iterator[HostileFile]:
    """Small files of much sound, and of sounds that are no numbers."""
    silence = np.zeros(90 * 16_000, np.float32)
    yield HostileFile("flac of a long silence", sound_file("flac", silence))
    yield HostileFile("mp3 of a long silence", sound_file("mp3", silence))
    yield HostileFile("wav of a long silence", wav(silence))
    yield HostileFile("wav of one sample a second", wav(np.zeros(200, np.float32), 1))
    yield HostileFile("wav of no numbers", sound_file("wav-float", np.full(1600, np.nan, np.float32)))
    yield HostileFile("wav of the largest numbers", sound_file("wav-float", np.full(1600, 3e38, np.float32)))
