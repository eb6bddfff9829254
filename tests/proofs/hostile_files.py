"""No upload holds the server up: `python -m tests.proofs.hostile_files`.

Each of a list of broken or absurd checkpoints is loaded while another process asks for the server's health all the
time. Each must be loaded or refused within ten seconds, by a message that names it and has 4,096 characters at most,
and none may leave a gap of more than a tenth of a second in the answers. Afterwards the good one is loaded.
"""

import http.client
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import quote

from cyclopts import App

from charonia.bench.server_process import ServerAddress, own_server

from ..tiny_model import NAME, write_llm
from .stalls import GAP_SECONDS, gap_watcher, longest_gap

SECONDS = 10.0
LONGEST_MESSAGE = 4096
_TRIES = 3
_ENGINE = {"threads": 1, "kv_cache_bytes": 16 << 20, "device": "cpu"}
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"

app = App(name="python -m tests.proofs.hostile_files", help=__doc__)


class HostileCheckpoint(NamedTuple):
    """A way to spoil a checkpoint. `spoil(directory, size)`: does so, with about `size` things where there are many.
    `says`: what the refusal has in it; empty where the checkpoint may be served."""

    name: str
    spoil: Callable[[Path, int], None]
    says: str = ""


class LoadResult(NamedTuple):
    """How a load ended. `message`: of its refusal. `gap`: the longest time between two health answers, in seconds."""

    checkpoint: HostileCheckpoint
    status: int
    message: str
    seconds: float
    gap: float = 0.0

    @property
    def faults(self) -> list[str]:
        named = self.checkpoint.says in self.message if self.status != 200 else not self.checkpoint.says
        wrong = {
            f"{self.seconds:.1f} s": self.seconds > SECONDS,
            f"{self.gap * 1000:.0f} ms": self.gap > GAP_SECONDS,
            f"a message of {len(self.message)}": len(self.message) > LONGEST_MESSAGE,
            f"{self.status} {self.message[:200]}": not named,
        }
        return [fault for fault, holds in wrong.items() if holds]


def _edit(directory: Path, file: str, changes: Mapping[str, Any]) -> None:
    path = directory / file
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **changes}))


def _config(**changes: Any) -> Callable[[Path, int], None]:
    return lambda directory, size: _edit(directory, "config.json", changes)


def _generation(**changes: Any) -> Callable[[Path, int], None]:
    return lambda directory, size: _edit(directory, "generation_config.json", changes)


def _tokenizer(**changes: Any) -> Callable[[Path, int], None]:
    return lambda directory, size: _edit(directory, "tokenizer.json", changes)


def _pipe(name: str) -> Callable[[Path, int], None]:
    def spoil(directory: Path, size: int) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return spoil


def _device(directory: Path, size: int) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to("/dev/zero")


def _sparse(name: str) -> Callable[[Path, int], None]:
    def spoil(directory: Path, size: int) -> None:
        with (directory / name).open("wb") as file:
            file.truncate(1 << 40)

    return spoil


def _long_header(directory: Path, size: int) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"tensor.{number}": entry for number in range(size)}).encode()
    (directory / _WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)


def _shards(directory: Path, size: int) -> None:
    _edit(directory, _INDEX, {"weight_map": {f"tensor.{number}": f"m-{number}.safetensors" for number in range(size)}})


def _outside(directory: Path, size: int) -> None:
    _edit(directory, _INDEX, {"weight_map": {"lm_head.weight": "../../../etc/passwd"}})


def _merges(directory: Path, size: int) -> None:
    letters = [chr(0x4E00 + number) for number in range(1 << 13)]
    pieces = letters[: int(size**0.5) + 1]
    pairs = [(first, second) for first in pieces for second in pieces][:size]
    vocabulary = {text: number for number, text in enumerate([*pieces, *(a + b for a, b in pairs)])}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [list(pair) for pair in pairs]}
    _edit(directory, "tokenizer.json", {"model": model})


def _added_tokens(directory: Path, size: int) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokens = [{"id": 1000 + number, "content": f"<|{number}|>", **flags} for number in range(size)]
    _edit(directory, "tokenizer.json", {"added_tokens": tokens})


def _declared_tokens(directory: Path, size: int) -> None:
    tokens = {str(1000 + number): {"content": f"<|{number}|>"} for number in range(size)}
    _edit(directory, "tokenizer_config.json", {"added_tokens_decoder": tokens})


_EVIL = {"type": "Split", "pattern": {"Regex": "(.+)+\u0000"}, "behavior": "Isolated", "invert": False}
_GROWS = {"type": "Replace", "pattern": {"String": "e"}, "content": "x" * (1 << 22)}

CHECKPOINTS = (
    HostileCheckpoint("a pipe for weights", _pipe(_WEIGHTS), "is a named pipe"),
    HostileCheckpoint("a pipe for a config", _pipe("generation_config.json"), "is a named pipe"),
    HostileCheckpoint("a device for a config", _device, "is a device"),
    HostileCheckpoint("weights of a terabyte", _sparse(_WEIGHTS), _WEIGHTS),
    HostileCheckpoint("a tokenizer of a terabyte", _sparse("tokenizer.json"), "tokenizer.json has 1099511627776 bytes"),
    HostileCheckpoint("a template of a terabyte", _sparse("chat_template.jinja"), "may have"),
    HostileCheckpoint("a long header", _long_header, "its header has"),
    HostileCheckpoint("many shards", _shards, "it names"),
    HostileCheckpoint("a shard elsewhere", _outside, "is not the name of a file in it"),
    HostileCheckpoint("many merges", _merges, "tokenizer.json"),
    HostileCheckpoint("many added tokens", _added_tokens, "added tokens"),
    HostileCheckpoint("many declared tokens", _declared_tokens, "tokenizer_config.json"),
    HostileCheckpoint("a pattern that goes back", _tokenizer(pre_tokenizer=_EVIL)),
    HostileCheckpoint("a text that grows", _tokenizer(normalizer=_GROWS), "tokenizer.json"),
    HostileCheckpoint("texts of 2 * 10^7 tokens", _config(max_position_embeddings=20_000_000)),
    HostileCheckpoint("rope_theta inf", _config(rope_parameters={"rope_theta": float("inf")}), "rope_theta must be"),
    HostileCheckpoint("an eos below 0", _generation(eos_token_id=-(2**70)), "eos_token_id"),
    HostileCheckpoint("a size of 400 digits", _config(hidden_size=10**400), "hidden_size"),
    HostileCheckpoint("long names", _config(layer_types=["full" * 1000] * 1000), "layer_types"),
    HostileCheckpoint(
        "no words", _tokenizer(model={"type": "WordLevel", "vocab": {}, "unk_token": "?"}), "tokenizer.json"
    ),
)
"""Each made from a good one."""

_SIZES = {"a long header": 1_000_000, "many shards": 300_000, "many merges": 1_000_000}
_SIZES |= {"many added tokens": 200_000, "many declared tokens": 200_000}


def spoilt(good: Path, directory: Path, hostile: HostileCheckpoint, size: int | None = None) -> Path:
    """A copy of the checkpoint `good` that was spoilt; `size`: for what there are many of, instead of the proof's."""
    shutil.copytree(good, directory)
    hostile.spoil(directory, size or _SIZES.get(hostile.name, 0))
    return directory


def _ask_to_load(place: ServerAddress, name: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(place.host, place.http_port, timeout=120)
    try:
        connection.request(
            "POST", f"/v2/repository/models/{quote(name)}/load", b"{}", {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        body = answer.read()
        return answer.status, "" if answer.status == 200 else json.loads(body)["error"]
    finally:
        connection.close()


def run_loads(repository: Path, place: ServerAddress, only: str = "", tries: int = 1) -> Iterator[LoadResult]:
    """Have a server that serves `repository`, which has the good model, load each: of several tries, the one with the
    smallest gap."""
    with gap_watcher(place) as watch:
        for number, hostile in enumerate(checkpoint for checkpoint in CHECKPOINTS if only in checkpoint.name):
            name = f"hostile{number}"
            (repository / name).mkdir()
            shutil.copy(repository / NAME / "config.pbtxt", repository / name)
            config = (repository / name / "config.pbtxt").read_text().replace(f'"{NAME}"', f'"{name}"')
            (repository / name / "config.pbtxt").write_text(config)
            spoilt(repository / NAME / "1", repository / name / "1", hostile)
            results = list[LoadResult]()
            while len(results) < tries and not any(not result.faults for result in results):
                longest_gap(watch)
                begun = time.monotonic()
                status, message = _ask_to_load(place, name)
                results.append(LoadResult(hostile, status, message, time.monotonic() - begun, longest_gap(watch)))
            shutil.rmtree(repository / name)
            yield min(results, key=lambda result: (len(result.faults), result.gap))
        status, message = _ask_to_load(place, NAME)
        yield LoadResult(HostileCheckpoint("the good one", lambda directory, size: None), status, message, 0.0)


@app.default
def main(only: str = "", tries: int = _TRIES) -> None:
    """Load each, or those with `only` in their name; the exit code is 0 if all bounds held."""
    failed = False
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        repository = Path(directory) / "models"
        write_llm(repository, _ENGINE)
        flags = "--model-repository", str(repository), "--model-control-mode", "explicit"
        with own_server(*flags) as place:
            for result in run_loads(repository, place, only, tries):
                failed = failed or bool(result.faults)
                told = f"{result.seconds:.2f} s, gap {result.gap * 1000:.0f} ms: {result.message[:120]}"
                print(f"{result.checkpoint.name}: {result.status}, {told} {'; '.join(result.faults)}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    app()
