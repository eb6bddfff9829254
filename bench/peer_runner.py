"""Runs one contender in an interpreter of its own, and speaks with the measuring process in lines of JSON.

    python -P peer_runner.py NAME SETUP

NAME is a key of `peers.PEER_CLASSES`, or charonia, whose class is in `inline_loop`; SETUP is a `PeerSetup` as JSON.
Once the peer is ready, a line with `about` says what it is; then each line {"prompts": [[ids]], "new": n} is answered
by {"tokens": [[ids]], "seconds": s}, or by {"error"} and the end. Imports the standard library alone: a peer's
interpreter has the peer, and no charonia.
"""

import json
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO


@dataclass(frozen=True)
class PeerSetup:
    """The work that a contender must be ready for: so many sequences of at most `length` tokens, prompt included.

    `precision`: of its computation. `chunk`: most tokens in a step. `folder`: for files of its own, such as the
    checkpoint in its format.
    """

    checkpoint: str
    precision: str
    sequences: int
    length: int
    chunk: int
    threads: int
    device: str
    folder: str


def main() -> None:
    """Answer until the standard input ends."""
    line = _line()
    try:
        peer = _peer_class(sys.argv[1])(PeerSetup(**json.loads(sys.argv[2])))
        _say(line, about=peer.about)
        for text in sys.stdin:
            job = json.loads(text)
            begun = perf_counter()
            tokens = peer.generate(job["prompts"], job["new"])
            _say(line, tokens=tokens, seconds=perf_counter() - begun)
    except Exception as error:
        _say(line, error=f"{type(error).__name__}: {error}")
        raise


def _line() -> TextIO:
    """The standard output for ourselves: whatever a peer prints goes where errors go."""
    line = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return line


def _say(line: TextIO, **fields: object) -> None:
    line.write(json.dumps(fields) + "\n")
    line.flush()


def _peer_class(name: str) -> Any:
    """The class of the engine `name`: ours is in `inline_loop` of this package, all others are in `peers.py`."""
    if name == "charonia":
        return import_module(".inline_loop", __package__).Peer
    spec = spec_from_file_location("peers", Path(__file__).with_name("peers.py"))
    assert spec is not None
    assert spec.loader is not None
    peers = module_from_spec(spec)
    spec.loader.exec_module(peers)
    return peers.PEER_CLASSES[name]


if __name__ == "__main__":
    main()
