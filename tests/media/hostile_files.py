"""Files that are no pictures, or not those that they say they are: what strangers send."""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from .pictures import file_of, picture


class HostileFile(NamedTuple):
    """A file; `of` is the one that it was made of, where a picture that comes of it must be the same."""

    name: str
    data: bytes
    of: bytes = b""


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes, depth: int = 8, packed: bool = False, more: bytes = b"") -> bytes:
    """A PNG in RGB of these rows, which need not be as many as the size says."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))
    data = rows if packed else zlib.compress(rows)
    return b"\x89PNG\r\n\x1a\n" + head + more + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def good_files() -> dict[str, bytes]:
    image = picture()
    return {
        "png": file_of(image),
        "png-palette": file_of(image.quantize(32)),
        "jpeg": file_of(image, "JPEG"),
        "jpeg-progressive": file_of(image, "JPEG", progressive=True),
        "gif": file_of(image, "GIF"),
        "webp": file_of(image, "WEBP"),
        "webp-lossless": file_of(image, "WEBP", lossless=True),
        "bmp": file_of(image, "BMP"),
        "tiff": file_of(image, "TIFF"),
        "tiff-lzw": file_of(image, "TIFF", compression="tiff_lzw"),
        "tiff-deflate": file_of(image, "TIFF", compression="tiff_adobe_deflate"),
    }


def hostile_files() -> Iterator[HostileFile]:
    """More than 200 of them, the same each time."""
    random, good = Random(7), good_files()
    for form, data in good.items():
        for cut in {1, 8, 20, *(len(data) * part // 10 for part in range(1, 10)), len(data) - 9, len(data) - 1}:
            yield HostileFile(f"{form}, cut off at {cut}", data[:cut], data)
        for number in range(6):
            torn = bytearray(data)
            for _ in range(1 + number):
                torn[random.randrange(len(torn))] ^= 1 << random.randrange(8)
            yield HostileFile(f"{form}, torn {number}", bytes(torn))
        yield from mixed(form, data)
    yield from lying_sizes(good)
    yield from bombs()
    for name, data in {
        "nothing but zeros": bytes(500),
        "noise": random.randbytes(5000),
        "a text": b"a picture " * 90,
        "an archive": archive(),
        "a program": b"\x7fELF" + bytes(200),
        "a program of Windows": b"MZ" + bytes(200),
        "a document": b"%PDF-1.7\n" + good["jpeg"],
        "PostScript": b"%!PS\n/x {x} def x\n",
        "SVG that asks a file": b"<svg><image href='file:///etc/passwd'/></svg>",
        "SVG of entities": b"<!DOCTYPE x [<!ENTITY a '" + b"a" * 99 + b"'>]><svg>" + b"&a;" * 99 + b"</svg>",
        "a GIF and a script": b"GIF89a=1/*" + bytes(40) + b"*/;alert(1)",
        "a head of JPEG alone": b"\xff\xd8\xff",
        "a head of RIFF alone": b"RIFF\xff\xff\xff\xffWEBP",
    }.items():
        yield HostileFile(name, data)


def mixed(form: str, data: bytes) -> Iterator[HostileFile]:
    """A file that holds something else for its last part, or before it, or behind it."""
    yield HostileFile(f"{form}, hollow", data[: len(data) // 3] + bytes(len(data) // 3 * 2))
    yield HostileFile(f"{form}, with a page behind it", data + b"<script>alert(1)</script>", data)
    yield HostileFile(f"{form}, with an archive behind it", data + archive(), data)
    yield HostileFile(f"{form}, behind a page", b"<html>" + data)


def archive() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as file:
        file.writestr("a.txt", "x" * 99)
    return target.getvalue()


def lying_sizes(good: dict[str, bytes]) -> Iterator[HostileFile]:
    """Files whose sizes are not those of their pixels."""
    places = {"png": (16, ">II"), "gif": (6, "<HH"), "bmp": (18, "<ii")}
    for form, (place, layout) in places.items():
        most = 0x7FFF if form == "gif" else 0x7FFFFFFF
        for width, height in ((0, 0), (1, 1), (61, 40), (60, 4000), (4000, 4000), (most, most), (most, 1)):
            head = bytearray(good[form])
            struct.pack_into(layout, head, place, width, height)
            if form == "png":
                struct.pack_into(">I", head, 29, zlib.crc32(head[12:29]))
            yield HostileFile(f"{form}, said to be {width} x {height}", bytes(head))
    data = good["jpeg"]
    frame = data.index(b"\xff\xc0")
    for width, height in ((0, 0), (4000, 4000), (0xFFFF, 0xFFFF), (60, 41)):
        head = bytearray(data)
        struct.pack_into(">HH", head, frame + 5, height, width)
        yield HostileFile(f"jpeg, said to be {width} x {height}", bytes(head))
    for form in ("tiff", "tiff-deflate"):
        for tag in (256, 257, 273, 277, 278, 279, 258, 259):  # sizes, strips, samples, bits, compression
            for value in (0, 0x7FFFFFFF):
                yield HostileFile(f"{form}, tag {tag} is {value}", with_tag(good[form], tag, value))


def with_tag(data: bytes, tag: int, value: int) -> bytes:
    """A little-endian TIFF with another value of a tag."""
    changed = bytearray(data)
    [place] = struct.unpack_from("<I", data, 4)
    [count] = struct.unpack_from("<H", data, place)
    for entry in range(place + 2, place + 2 + 12 * count, 12):
        if struct.unpack_from("<H", data, entry) == (tag,):
            struct.pack_into("<I", changed, entry + 8, value)
    return bytes(changed)


def bombs() -> Iterator[HostileFile]:
    """Files that become a thousand times larger."""
    zeros = zlib.compress(bytes(1 << 24), 1)
    yield HostileFile("png of too many pixels", png(50_000, 50_000, zeros, packed=True))
    yield HostileFile("png of more rows than pixels", png(64, 64, zeros, packed=True))
    yield HostileFile("png whose text swells", png(8, 8, bytes(25 * 8), more=chunk(b"zTXt", b"a\0\0" + zeros)))
    yield HostileFile("png whose profile swells", png(8, 8, bytes(25 * 8), more=chunk(b"iCCP", b"a\0\0" + zeros)))
    yield HostileFile(
        "png whose translated text swells", png(8, 8, bytes(200), more=chunk(b"iTXt", b"a\0\1\0\0\0" + zeros))
    )
    small = zlib.compress(bytes(1 << 20), 1)
    texts = b"".join(chunk(b"zTXt", b"a%d\0\0" % number + small) for number in range(80))
    yield HostileFile("png of many texts", png(8, 8, bytes(25 * 8), more=texts))
    yield HostileFile("png of many chunks", png(8, 8, bytes(25 * 8), more=chunk(b"tEXt", b"a\0b") * 9999))
    frames = [picture(32, 32, seed) for seed in range(20)]
    yield HostileFile("gif of many frames", file_of(frames[0], "GIF", save_all=True, append_images=frames[1:]))
