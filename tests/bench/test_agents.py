"""Agents' traffic has the figures that were published of it."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from charonia.bench.agents import agent_sessions, trace
from charonia.bench.load.planned_requests import read_trace


def test_conversations_grow_and_pause_as_published() -> None:
    jobs = [*agent_sessions(16, 2)]
    assert len(jobs) == 16 * 2 * 43
    conversation, after = jobs[:43], jobs[43:86]
    assert (conversation[0].prompt, conversation[-1].prompt) == (20_000, pytest.approx(142_000, rel=0.03))
    assert after[0].prompt == 20_000
    assert all(job.new == 444 for job in jobs)
    grown = [(now.prompt, before.prompt + before.new) for before, now in pairwise(conversation)]
    assert all(prompt >= said for prompt, said in grown), "an answer is part of the next prompt"
    assert sum(said for _, said in grown) > 0.9 * sum(prompt for prompt, _ in grown)
    pauses = np.array([job.pause for job in jobs if job.pause])
    assert len(pauses) == len(jobs) - 16
    assert np.mean(pauses <= 1) == pytest.approx(0.86, abs=0.03)
    assert np.mean(pauses <= 10) == pytest.approx(0.95, abs=0.02)
    assert 30 < pauses.max() <= 60


def test_others_come_once_beside_them(tmp_path: Path) -> None:
    trace(tmp_path / "a.csv", sessions=1, conversations=1, turns=2, others=2.0, seconds=50, scale=10)
    lone = [job for job in read_trace(tmp_path / "a.csv") if not job.session]
    assert len(lone) == pytest.approx(100, rel=0.3)
    assert {(job.prompt, job.new) for job in lone} == {(3200, 44)}


def test_a_trace_is_scaled_and_the_same_for_a_seed(tmp_path: Path) -> None:
    trace(tmp_path / "a.csv", sessions=3, conversations=1, turns=5, scale=100, seed=2)
    jobs = read_trace(tmp_path / "a.csv")
    assert len(jobs) == 15
    assert {job.session for job in jobs} == {"0", "1", "2"}
    assert max(job.prompt for job in jobs) == pytest.approx(1420, rel=0.05)
    trace(tmp_path / "b.csv", sessions=3, conversations=1, turns=5, scale=100, seed=2)
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()
