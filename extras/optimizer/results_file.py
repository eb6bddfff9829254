"""The results of an analysis as they come, a line of JSON each: what a run that was broken off goes on from.

The first line says what was measured. A last line that was not written to its end is not there.
"""

import fcntl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...core.errors import InvalidArgument
from .search_goal import ConfigurationTrial, ParameterValue

_FORMAT = 2


class AnalysisSubject(msgspec.Struct, frozen=True, kw_only=True):
    """What the figures of a file have in common: other models, loads or machines have other figures. `digest`: of the
    models' files and configs. `seconds`: of load of a full measurement, which a run with another budget keeps."""

    source: str
    model: str
    digest: str
    load: dict[str, Any]
    machine: str
    seconds: float
    format: int = _FORMAT


class TrialRecord(msgspec.Struct, frozen=True):
    """A trial with its settings by their names: parameters may come and go between two runs."""

    settings: dict[str, ParameterValue]
    trial: ConfigurationTrial


class ResultsFile:
    """Trials by settings and length; `count` of those it had when it was opened, and `seconds` of load that full ones
    have in it. One that is asked for is given once, so that a repetition is measured again.

    Raises:
        InvalidArgument: the file is another analysis's, or none, or another run writes it.
    """

    def __init__(self, path: Path, subject: AnalysisSubject) -> None:
        self.path = path
        self.seconds = subject.seconds
        self._left: dict[tuple[frozenset[tuple[str, ParameterValue]], float], list[ConfigurationTrial]] = {}
        self.count = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise InvalidArgument(f"another run writes its results to {path}: give another --report") from None
        except OSError as error:
            raise InvalidArgument(f"cannot write the results to {path}: {error.strerror}") from None
        try:
            kept = self._read(subject)
        except InvalidArgument:
            self._file.close()
            raise
        self._file.truncate(kept)
        if not kept:
            self._write(subject)

    def _read(self, subject: AnalysisSubject) -> int:
        """The bytes of the file that are whole lines."""
        self._file.seek(0)
        whole = self._file.read()
        lines = whole[: whole.rfind(b"\n") + 1].splitlines(keepends=True)
        if not lines:
            return 0
        try:
            earlier = msgspec.json.decode(lines[0], type=AnalysisSubject)
            records = [msgspec.json.decode(line, type=TrialRecord) for line in lines[1:]]
        except msgspec.MsgspecError as error:
            message = f"{self.path} is no file of results ({error}): remove it, or give another --report"
            raise InvalidArgument(message) from None
        if not records:
            return 0
        mine = msgspec.to_builtins(subject)
        theirs = msgspec.to_builtins(earlier)
        if differing := [name for name in mine if mine[name] != theirs.get(name) and name != "seconds"]:
            what = {"digest": "state of the models' files"}.get(differing[0], differing[0])
            message = f"{self.path} has results of another {what}: remove it, or give another --report"
            raise InvalidArgument(message)
        for record in records:
            self._left.setdefault(_key(record.settings, record.trial.seconds), []).append(record.trial)
        self.count = len(records)
        self.seconds = earlier.seconds
        return sum(map(len, lines))

    def take(self, settings: Mapping[str, ParameterValue], seconds: float) -> ConfigurationTrial | None:
        """A result that was there when the file was opened, and was not taken yet."""
        left = self._left.get(_key(settings, seconds))
        return left.pop(0) if left else None

    def add(self, settings: Mapping[str, ParameterValue], trial: ConfigurationTrial) -> None:
        self._write(TrialRecord(dict(settings), trial))

    def _write(self, line: AnalysisSubject | TrialRecord) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _key(settings: Mapping[str, ParameterValue], seconds: float) -> tuple[frozenset[tuple[str, ParameterValue]], float]:
    return frozenset(settings.items()), round(seconds, 6)
