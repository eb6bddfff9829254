"""Whatever the sandbox offers, asked for 10^7 of something, ends within the memory and the time of a small request."""

import tracemalloc
from collections.abc import Iterator, Sequence

import pytest

from charonia.processes.limited_process import CallLimits, CallLost, LimitedProcess, TimeLimitExceeded
from charonia.tokenization.chat_template import template_environment
from charonia.tokenization.template_sandbox import metered
from charonia.tokenization.template_work import TemplateLimitExceeded, WorkMeter

from .template_trials import make_renderer, trials

LIMITS = CallLimits(seconds=100.0, memory=256 << 20)
CPU_SECONDS = 10.0
"""What a template may compute: the wall's time is that of whatever else the machine does, too."""
PARTS = 64
"""Of all templates, each for the time of a test."""


class Renderer:
    """A process that renders, started again after a template that ended it."""

    process: LimitedProcess | None = None

    def render(self, source: str) -> str:
        if self.process is None or not self.process.alive:
            self.process = LimitedProcess("charonia-trials", make_renderer)
        return self.process.call(source.encode(), LIMITS).decode()


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    if renderer.process is not None and renderer.process.alive:
        renderer.process.close()


def check(renderer: Renderer, sources: Sequence[str]) -> None:
    wrong = {}
    for source in sources:
        try:
            end, _, cpu_seconds = renderer.render(source).partition(" after ")
        except (TimeLimitExceeded, CallLost) as error:
            wrong[source] = repr(error)
        else:
            if not end.startswith(("rendered", "refused")) or float(cpu_seconds) > CPU_SECONDS:
                wrong[source] = f"{end} after {cpu_seconds} s"
    assert wrong == {}


def test_some_of_what_is_offered_ends_within_bounds(renderer: Renderer) -> None:
    check(renderer, [*trials()][::397])


@pytest.mark.proof
@pytest.mark.parametrize("part", range(PARTS))
def test_all_that_is_offered_ends_within_bounds(renderer: Renderer, part: int) -> None:
    check(renderer, [*trials()][part::PARTS])


@pytest.mark.parametrize("name", ["batch", "slice"])
def test_lists_are_paid_for_before_they_are_filled(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TemplateLimitExceeded), metered(WorkMeter()):
            template_environment().compiled(f"{{{{ 'x' | {name}(10000000, 'y') | list }}}}").render()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("given", ["'%c' * 10000000", "'%9999999Y' * 1000", "'%c' * 2000"])
def test_the_time_is_no_way_around_the_meter(renderer: Renderer, given: str) -> None:
    assert renderer.render(f"{{{{ strftime_now({given}) }}}}").startswith("refused: TemplateLimitExceeded after ")
