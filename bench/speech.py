"""Sounds written down: 30 seconds each, over HTTP, beside CTranslate2, which is how faster-whisper computes.

    python -m venv peer && peer/bin/pip install faster-whisper transformers torch
    python -m charonia.bench.speech --peer ctranslate2=peer/bin/python
    python -m charonia.bench.speech --shapes tiny --sounds 1 8 --threads 2

Checkpoints of Whisper's shapes with random weights, which never end a transcript by themselves: both make 224 tokens
of a window, greedily or nearly so, in int8. Contenders take turns over sounds that nobody heard before: ours as
requests at once, the peer as one batch, its features by faster-whisper. Ends with status 1 if a bar is missed.
"""

import io
import json
import sys
import wave
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from cyclopts import App

from ..core.errors import Internal, InvalidArgument
from ..core.speech import LANGUAGE_NAMES
from ..processes.host import usable_cores
from .checkpoint import build_tokenizer
from .command import (
    Count,
    Counts,
    Log,
    Several,
    exit_on_error,
    log_to,
    report_console,
    run_command,
    seconds_of,
    table_of,
)
from .peer_process import PeerProcess, PeerSpec
from .peer_runner import PeerSetup
from .server_process import ServerAddress, fetch, own_server
from .trial import TrialVerdict, median_of, ratio_of, show_verdicts, take_turns

SpeechShape: TypeAlias = Literal["tiny", "small"]

SPEECH_SHAPES: dict[SpeechShape, dict[str, int]] = {
    "tiny": {"d_model": 384, "layers": 4, "attention_heads": 6, "ffn_dim": 1536},
    "small": {"d_model": 768, "layers": 12, "attention_heads": 12, "ffn_dim": 3072},
}
"""Whisper's; what both parts have is named once."""

SECONDS, RATE = 30, 16000
TOKENS = 224
"""That a window has at most."""
_BAR = 1.3
_WORDS, _LANGUAGES, _TIMES = 50257, 99, 1501
_OURS, _THEIRS = "charonia", "ctranslate2"
_BOUNDARY = b"sound"


class SpeechRun(NamedTuple):
    """A turn of one contender."""

    seconds: float
    sounds: int

    @property
    def speed(self) -> float:
        """Seconds of sound a second."""
        return SECONDS * self.sounds / self.seconds


app = App(name="python -m charonia.bench.speech", help=__doc__)


def write_speech_model(directory: Path, config: dict[str, int]) -> None:
    """A checkpoint with a vocabulary like Whisper's, an extractor of features and random weights; `config` as in
    `SPEECH_SHAPES`."""
    import torch
    import transformers

    library: Any = transformers  # its classes' types are not those of their arguments
    languages = [f"<|{code}|>" for code in [*LANGUAGE_NAMES][:_LANGUAGES]]
    works = ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    times = [f"<|{number * 0.02:.2f}|>" for number in range(_TIMES)]
    special = ["<|endoftext|>", "<|startoftranscript|>", *languages, *works, *times]
    ids = {text: _WORDS + number for number, text in enumerate(special)}
    shared = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in config.items()}
    ends = {f"{name}_token_id": ids["<|endoftext|>"] for name in ("bos", "eos", "pad")}
    start = {"decoder_start_token_id": ids["<|startoftranscript|>"], **ends}
    torch.manual_seed(0)
    parsed = library.WhisperConfig(
        vocab_size=_WORDS + len(special), d_model=config["d_model"], suppress_tokens=[], **shared, **start
    )
    model = library.WhisperForConditionalGeneration(parsed)
    # Tokens are likely, as those of a trained model.
    model.model.decoder.layer_norm.weight.data *= 400 / config["d_model"] ** 0.5
    generation = {
        "lang_to_id": {name: ids[name] for name in languages},
        "task_to_id": {name[2:-2]: ids[name] for name in works[:2]},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "suppress_tokens": [ids["<|endoftext|>"]],
        "begin_suppress_tokens": [],
        "is_multilingual": True,
        "max_length": 2 * TOKENS,
        **start,
    }
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(directory)
    library.WhisperFeatureExtractor().save_pretrained(directory)
    tokenizer = build_tokenizer(_WORDS)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    ends_text = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "WhisperTokenizer", **ends_text}))


def make_sound(seed: Sequence[int]) -> bytes:
    """A WAV file of noise."""
    samples = np.random.default_rng(seed).normal(0, 3000, SECONDS * RATE).clip(-32768, 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, RATE, 0, "NONE", ""))
        written.writeframes(samples.tobytes())
    return file.getvalue()


def transcribe(place: ServerAddress, sound: bytes) -> int:
    """Have a sound written down; returns how many tokens were made."""
    fields = {"language": "en", "temperature": "0.0001", "stream": "true"}
    parts = [f'name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    parts.append(b'name="file"; filename="sound.wav"\r\n\r\n' + sound)
    body = b"".join(b"--%b\r\nContent-Disposition: form-data; %b\r\n" % (_BOUNDARY, part) for part in parts)
    body += b"--%b--\r\n" % _BOUNDARY
    headers = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY.decode()}"}
    answer = fetch(place, "/v1/audio/transcriptions", body, timeout=600, headers=headers)
    last = [line for line in answer.decode().splitlines() if line.startswith("data: {")][-1]
    return int(json.loads(last.removeprefix("data: "))["usage"]["output_tokens"])


def run_ours(place: ServerAddress, count: int, turn: int) -> SpeechRun:
    """`count` sounds at once, which no other turn has. Raises `Internal` if they do not have as many tokens as they
    should."""
    sounds = [make_sound([count, turn + 1, number]) for number in range(count)]
    made: list[int] = []
    with ThreadPoolExecutor(count) as threads:
        seconds = seconds_of(lambda: made.extend(threads.map(partial(transcribe, place), sounds)))
    if made != [TOKENS] * count:
        raise Internal(f"{count} windows have {made} tokens, and not {TOKENS} each")
    return SpeechRun(seconds, count)


def run_theirs(peer: PeerProcess, directory: Path, count: int, _: int) -> SpeechRun:
    """The same by the peer, whose sounds are numbered by itself. Raises as `PeerProcess.generate`."""
    ids = json.loads((directory / "generation_config.json").read_text())
    asked = ids["lang_to_id"]["<|en|>"], ids["task_to_id"]["transcribe"]
    prompt = [ids["decoder_start_token_id"], *asked, ids["no_timestamps_token_id"]]
    return SpeechRun(peer.generate([prompt] * count, TOKENS).seconds, count)


def parse_speech_peer(peer: str) -> Path:
    """The interpreter of the one peer there is. Raises `InvalidArgument`."""
    name, _, python = peer.partition("=")
    if name != _THEIRS or not Path(python).is_file():
        raise InvalidArgument(f"peer must be {_THEIRS}=PYTHON, an interpreter that is there, got {peer!r}")
    return Path(python)


def measure(
    directory: Path, scratch: Path, sounds: Sequence[int], repeats: int, threads: int, peer: Path | None, log: Log
) -> dict[int, dict[str, list[SpeechRun]]]:
    """Turns of all contenders by how many sounds came at once."""
    with ExitStack() as stack:
        flags = ("--quantization", "int8", "--threads", str(threads))
        place = stack.enter_context(own_server(str(directory), *flags))
        theirs = None
        if peer is not None:
            setup = PeerSetup(str(directory), "int8", max(sounds), 2 * TOKENS, 0, threads, "cpu", str(scratch))
            theirs = stack.enter_context(PeerProcess(PeerSpec(_THEIRS, "int8", peer), setup))
            log(theirs.about)
        runs = {}
        for count in sounds:
            turns: dict[str, Callable[[int], SpeechRun]] = {_OURS: partial(run_ours, place, count)}
            if theirs is not None:
                turns[_THEIRS] = partial(run_theirs, theirs, directory, count)
            for turn in turns.values():
                turn(-1)  # what is only done once
            runs[count] = take_turns(turns, repeats, log, lambda run: f"{run.sounds} at once: {run.seconds:.2f} s")
        return runs


@app.default
def main(
    *,
    shapes: Annotated[tuple[SpeechShape, ...], Several] = ("tiny", "small"),
    sounds: Counts = (1, 8),
    repeats: Count = 3,
    threads: Count | None = None,
    peer: str | None = None,
    scratch: Path | None = None,
) -> None:
    """Measure.

    Parameters
    ----------
    shapes
        Of the models.
    sounds
        How many come at once.
    repeats
        Turns of each contender.
    threads
        That each computes with; all cores if it is left out.
    peer
        ctranslate2=PYTHON: an interpreter that has faster-whisper, transformers and torch.
    scratch
        Where checkpoints are kept for the next time.
    """
    console = report_console()
    log = log_to(console)
    table = table_of(("shape", "at once", "contender"), ("seconds", "seconds of sound a second", "of theirs"))
    verdicts = []
    with exit_on_error(), ExitStack() as stack:
        python = None if peer is None else parse_speech_peer(peer)
        folder = scratch or Path(stack.enter_context(TemporaryDirectory(prefix="charonia-bench-")))
        for shape in shapes:
            directory = folder / f"whisper-{shape}"
            if not (directory / "tokenizer_config.json").exists():
                log(f"random weights of whisper-{shape}'s shape")
                write_speech_model(directory, SPEECH_SHAPES[shape])
            cores = threads or usable_cores().physical
            for count, runs in measure(directory, folder, sounds, repeats, cores, python, log).items():
                for name, own in runs.items():
                    ratio = ""
                    if name == _OURS and _THEIRS in runs:
                        speed = ratio_of(own, runs[_THEIRS], lambda run: run.speed)
                        verdicts.append(TrialVerdict(f"{shape}, {count} at once, beside {_THEIRS}", speed, _BAR, True))
                        ratio = f"{speed:.2f}"
                    seconds = median_of(own, lambda run: run.seconds)
                    table.add_row(shape, str(count), name, f"{seconds:.2f}", f"{SECONDS * count / seconds:.0f}", ratio)
    console.print(table)
    show_verdicts(console, verdicts)
    sys.exit(not all(verdict.met for verdict in verdicts))


if __name__ == "__main__":
    run_command(app)
