"""Instruments, how they read, and the loop's lag by a clock that the test turns."""

import json
import logging
import sys
import time

import pytest

from charonia.core.metrics import DrafterTotals, EngineTotals, Histogram, Reading
from charonia.core.request_context import QUEUE_FULL_ENDS, Outcome, RequestEnd
from charonia.telemetry.llm_metrics import CacheBlocks, EngineState, LlmMetrics
from charonia.telemetry.logging_setup import JsonFormatter
from charonia.telemetry.loop_lag import LoopLag
from charonia.telemetry.metric_families import CHARONIA_FAMILIES, TRITON_FAMILIES, VLLM_FAMILIES, vllm_readings

IDLE = EngineState()


def read(metrics: LlmMetrics, family: str, engine: EngineState = IDLE) -> dict[tuple[str, ...], float]:
    """The numbers of a family by their label values."""
    found = [reading for reading in metrics.readings(engine) if reading.family == family]
    return {tuple(reading.labels.values()): reading.value for reading in found}


def test_a_histogram_counts_up_to_and_including_its_bounds() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 5.1):
        histogram.observe(value)
    histogram.observe(2, times=3)
    assert histogram.counts == [2, 4, 1, 1]
    assert histogram.sum == pytest.approx(0.5 + 1 + 1.5 + 5 + 5.1 + 6)


def test_every_reading_has_a_family() -> None:
    known = {family.name for family in (*CHARONIA_FAMILIES, *TRITON_FAMILIES, *VLLM_FAMILIES)}
    adapters = Reading("vllm:lora_requests_info", 1.0, {"running_lora_adapters": "a,b"})
    drafters = {
        "ngram": DrafterTotals(3, 6, 4, accepted_by_place=[3, 1]),
        "prediction": DrafterTotals(1, 3, 2, accepted_by_place=[1, 1, 0]),
    }
    state = EngineState(totals=EngineTotals(drafters=drafters), blocks=CacheBlocks(16, 8, 2))
    readings = [*LlmMetrics().readings(state), adapters]
    assert {reading.family for reading in readings} <= known
    theirs = list(vllm_readings(readings))
    assert {reading.family for reading in theirs} == {family.name for family in VLLM_FAMILIES}
    assert adapters in theirs
    places = [each.value for each in theirs if each.family == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert places == [4, 2, 0]
    assert Reading("vllm:spec_decode_num_accepted_tokens_total", 6, {"finished_reason": "", "position": ""}) in theirs
    assert Reading("charonia_draft_tokens_total", 3, {"drafter": "prediction"}) in readings
    assert len(known) == len(CHARONIA_FAMILIES) + len(TRITON_FAMILIES) + len(VLLM_FAMILIES)


def test_pickers_read_the_load_by_vllms_names_and_by_those_of_tritons_tensorrt_llm() -> None:
    engine = EngineState(
        running=3,
        most_running=8,
        prefilling=1,
        waiting={"0": 2, "4": 1},
        kv_usage=0.75,
        blocks=CacheBlocks(16, 8, 2),
        totals=EngineTotals(prefix_hits=50),
    )
    assert read(LlmMetrics(), "nv_trt_llm_request_metrics", engine) == {
        ("active",): 6,
        ("max",): 8,
        ("scheduled",): 3,
        ("context",): 1,
        ("waiting",): 3,
    }
    assert read(LlmMetrics(), "nv_trt_llm_kv_cache_block_metrics", engine) == {
        ("max",): 8,
        ("free",): 2,
        ("used",): 6,
        ("tokens_per",): 16,
        ("reused",): 3,
        ("fraction",): 0.75,
    }
    assert read(LlmMetrics(), "vllm:cache_config_info", engine) == {("16", "8"): 1}
    assert read(LlmMetrics(), "vllm:cache_config_info") == {}, "there is none before the engine is there"


def test_every_outcome_is_there_from_the_start() -> None:
    counts = read(LlmMetrics(), "charonia_requests_total")
    assert set(counts.values()) == {0}
    assert {outcome for outcome, _ in counts} == {outcome.value for outcome in Outcome}


def test_triton_has_its_own_words_for_ends() -> None:
    metrics = LlmMetrics()
    ends = [
        RequestEnd(Outcome.STOP),
        RequestEnd(Outcome.LENGTH),
        RequestEnd(Outcome.DONE),
        RequestEnd(Outcome.CANCELLED),
        RequestEnd(Outcome.TIMEOUT),
    ]
    metrics.ended.update([*ends, *QUEUE_FULL_ENDS.values()])
    metrics.ended.update([RequestEnd(Outcome.ERROR, "internal"), RequestEnd(Outcome.REJECTED, "invalid_argument")])
    assert read(metrics, "nv_inference_request_success") == {(): 2}
    failures = read(metrics, "nv_inference_request_failure")
    assert failures == {("REJECTED",): 3, ("CANCELED",): 1, ("BACKEND",): 1, ("OTHER",): 1}


def test_vllm_sums_what_it_does_not_tell_apart() -> None:
    metrics = LlmMetrics()
    metrics.tenant("a").generated, metrics.tenant("b").generated = 3, 4
    metrics.ended.update(
        [RequestEnd(Outcome.ERROR, "internal"), RequestEnd(Outcome.ERROR, "unavailable"), QUEUE_FULL_ENDS["tokens"]]
    )
    metrics.first_token.observe(0.2)
    readings = list(vllm_readings(metrics.readings(EngineState(waiting={"0": 2, "4": 1}))))
    numbers = {(r.family, r.labels.get("finished_reason")): r.value for r in readings if not _is_histogram(r)}
    assert numbers["vllm:generation_tokens_total", ""] == 7
    assert numbers["vllm:num_requests_waiting", ""] == 3
    assert numbers["vllm:request_success_total", "error"] == 2
    assert Reading("vllm:time_to_first_token_seconds", metrics.first_token) in readings


def _is_histogram(reading: Reading) -> bool:
    return isinstance(reading.value, Histogram)


def test_nobody_waiting_is_a_zero() -> None:
    engine = EngineState(waiting={"3": 2})
    assert read(LlmMetrics(), "charonia_requests_waiting", engine) == {("0",): 0, ("3",): 2}
    assert read(LlmMetrics(), "nv_inference_pending_request_count", engine) == {(): 2}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_stuck_loop_is_noticed_and_forgotten() -> None:
    clock = Clock()
    with LoopLag(bound=5, clock=clock) as lag:
        assert (lag.seconds, lag.stuck) == (0, False)
        clock.now += 7.25  # the timer was due after a quarter of a second
        assert (lag.seconds, lag.stuck) == (7.0, True)
        turn_on_time(lag, clock, seconds=9)
        assert lag.stuck
        turn_on_time(lag, clock, seconds=20)
        assert (lag.seconds, lag.stuck) == (0, False)
        [(labels, readings)] = lag.measure()
    read = {reading.family: reading.value for reading in readings}
    assert (labels, read["charonia_event_loop_lag_seconds"]) == ({}, 0)
    assert read["charonia_uptime_seconds"] == 7.25 + 29
    assert 0 < time.time() - read["charonia_start_time_seconds"] < 3600
    delays = read["charonia_event_loop_delay_seconds"]
    assert (sum(delays.counts), delays.sum) == (1 + 4 * 29 + 1, 7.0)
    assert 0 < read["charonia_event_loop_cpu_seconds_total"] <= time.thread_time()


def turn_on_time(lag: LoopLag, clock: Clock, seconds: int) -> None:
    lag._on_timer()
    for _ in range(4 * seconds):
        clock.now += 0.25
        lag._on_timer()


def test_a_record_is_one_line_of_json() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        info = sys.exc_info()
    record = logging.LogRecord("charonia.x", logging.INFO, __file__, 1, "a %s\nb", ("word",), info)
    record.tokens, record.color_message = 3, "\x1b[1ma"
    line = JsonFormatter().format(record)
    told = json.loads(line)
    assert "\n" not in line
    assert (told["level"], told["logger"], told["message"], told["tokens"]) == ("INFO", "charonia.x", "a word\nb", 3)
    assert "ValueError: why" in told["traceback"]
    assert "color_message" not in told
