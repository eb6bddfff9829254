"""The results of an analysis as they come, a line of JSON each: what a run that was broken off goes on from.

The first line says what was measured. A last line that was not written to its end is not there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..core.errors import InvalidArgument
from ..planning.search_goal import ConfigurationTrial, KnobValue

_FORMAT = 1


class AnalysisSubject(msgspec.Struct, frozen=True, kw_only=True):
    """What the figures of a file have in common: other models, loads or machines have other figures. `digest`: of the
    models' files and configs."""

    source: str
    model: str
    digest: str
    load: dict[str, Any]
    machine: str
    format: int = _FORMAT


class TrialRecord(msgspec.Struct, frozen=True):
    """A trial with its settings by their names: knobs may come and go between two runs."""

    settings: dict[str, KnobValue]
    trial: ConfigurationTrial


class ResultsFile:
    """Trials by settings and length; `count` of those it had when it was opened. One that is asked for is given once,
    so that a repetition is measured again.

    Raises:
        InvalidArgument: the file is another analysis's, or none.
    """

    def __init__(self, path: Path, subject: AnalysisSubject) -> None:
        self.path = path
        self._left: dict[tuple[frozenset[tuple[str, KnobValue]], float], list[ConfigurationTrial]] = {}
        self.count = 0
        kept = self._read(subject) if path.exists() else 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("r+b" if kept else "wb")
        except OSError as error:
            raise InvalidArgument(f"cannot write the results to {path}: {error.strerror}") from None
        self._file.seek(kept)
        self._file.truncate()
        if not kept:
            self._write(subject)

    def _read(self, subject: AnalysisSubject) -> int:
        """The bytes of the file that are whole lines."""
        try:
            whole = self.path.read_bytes()
        except OSError as error:
            raise InvalidArgument(f"cannot read {self.path}: {error.strerror}") from None
        lines = whole[: whole.rfind(b"\n") + 1].splitlines(keepends=True)
        if not lines:
            return 0
        try:
            found = msgspec.json.decode(lines[0], type=AnalysisSubject)
            records = [msgspec.json.decode(line, type=TrialRecord) for line in lines[1:]]
        except msgspec.MsgspecError as error:
            message = f"{self.path} is no file of results ({error}): remove it, or give another --report"
            raise InvalidArgument(message) from None
        mine, theirs = msgspec.to_builtins(subject), msgspec.to_builtins(found)
        if differing := [name for name in mine if mine[name] != theirs.get(name)]:
            message = f"{self.path} has results of another {differing[0]}: remove it, or give another --report"
            raise InvalidArgument(message)
        for each in records:
            self._left.setdefault(_key(each.settings, each.trial.seconds), []).append(each.trial)
        self.count = len(records)
        return sum(map(len, lines))

    def take(self, settings: Mapping[str, KnobValue], seconds: float) -> ConfigurationTrial | None:
        """A result that was there when the file was opened, and was not taken yet."""
        left = self._left.get(_key(settings, seconds))
        return left.pop(0) if left else None

    def add(self, settings: Mapping[str, KnobValue], trial: ConfigurationTrial) -> None:
        self._write(TrialRecord(dict(settings), trial))

    def _write(self, line: AnalysisSubject | TrialRecord) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _key(settings: Mapping[str, KnobValue], seconds: float) -> tuple[frozenset[tuple[str, KnobValue]], float]:
    return frozenset(settings.items()), round(seconds, 6)
