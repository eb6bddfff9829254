"""The progress of loading at the start: bars on a terminal, plain lines anywhere else.

Knows nothing of what is loaded.
"""

import sys
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from ..repository.backend_registry import OnProgress


class ProgressDisplay:
    """A `LoadListener` that writes to stdout; a phase leaves one line with the time it took."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        bar = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        self._bars = Progress(*bar, console=self._console, transient=True)
        self._phases: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def print_line(self, text: str) -> None:
        self._console.print(text)
        sys.stdout.flush()

    def on_loading(self, name: str) -> OnProgress:
        self._show(f"{name}: starting", 0)

        def on_progress(phase: str, fraction: float, seconds: float, detail: str) -> None:
            self._hide(f"{name}: starting")
            title = f"{name}: {phase}"
            self._show(title, fraction)
            if fraction >= 1:
                self._hide(title)
                self.print_line(f"{title} {_seconds(seconds)}{f'  {detail}' if detail else ''}")

        return on_progress

    def on_loaded(self, name: str, seconds: float) -> None:
        self._end(name, f"ready after {_seconds(seconds)}")

    def on_failed(self, name: str, reason: str) -> None:
        self._end(name, f"FAILED: {reason}")

    def _end(self, name: str, result: str) -> None:
        for title in [title for title in self._phases if title.startswith(f"{name}: ")]:
            self._hide(title)
        self.print_line(f"{name}: {result}")

    def _show(self, title: str, fraction: float) -> None:
        if title not in self._phases:
            self._phases[title] = self._bars.add_task(title, total=1.0)
        self._bars.update(self._phases[title], completed=fraction)

    def _hide(self, title: str) -> None:
        if title in self._phases:
            self._bars.remove_task(self._phases.pop(title))


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
