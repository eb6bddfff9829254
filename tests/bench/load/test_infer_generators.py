"""What wrk 4.1.0 and h2load 1.52.0 printed, and what it means."""

import numpy as np
import pytest

from charonia.bench.load.infer_generators import (
    H2loadTimes,
    H2loadTraffic,
    h2load_report,
    read_h2load,
    read_wrk,
    wrk_report,
)
from charonia.core.errors import Unavailable

WRK = """\
Running 1s test @ http://127.0.0.1:38959/v2/models/identity/infer
  1 threads and 4 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.22ms    1.50ms   9.33ms   85.48%
    Req/Sec     5.40k     0.85k    6.68k    60.00%
  5379 requests in 1.01s, 1.67MB read
  Non-2xx or 3xx responses: 379
  Socket errors: connect 0, read 3, write 0, timeout 1
Requests/sec:   5351.15
Transfer/sec:      1.66MB
{"answers":5379,"microseconds":1005205,"refused":379,"broken":4,"p50":423.000000,"p99":6942.000000}
"""
H2LOAD = """\
Main benchmark duration is over for thread #0. Stopping all clients.
Stopped all clients for thread #0

finished in 1.00s, 1306.00 req/s, 202.51KB/s
requests: 1306 total, 1370 started, 1306 done, 1300 succeeded, 0 failed, 6 errored, 0 timeout
status codes: 1304 2xx, 0 3xx, 2 4xx, 0 5xx
traffic: 202.51KB (207367) total, 3.97KB (4068) headers (space savings 96.15%), 133.92KB (136080) data
                     min         max         mean         sd        +/- sd
time for request:     2.54ms     94.42ms     47.98ms     16.75ms    66.69%
time for connect:       69us       125us        97us        39us   100.00%
"""
DEAD = """\
Running 1s test @ http://127.0.0.1:56629/v2/models/identity/infer
  0 requests in 1.01s, 0.00B read
"""


def test_of_wrks_answers_those_with_an_error_are_none() -> None:
    report = wrk_report(read_wrk(WRK), cpu=0.25)
    assert (report.answers, report.errors) == (5000, 383)
    assert (report.seconds, report.cpu) == (1.005205, 0.25)
    assert (report.p50, report.p99) == (0.423, 6.942)


def test_of_calls_of_h2load_those_without_a_message_have_failed() -> None:
    traffic = read_h2load(H2LOAD)
    assert traffic == H2loadTraffic(done=1306, succeeded=1304, data=136080)
    report = h2load_report(traffic, 105, H2loadTimes(1.0, 0.5, np.arange(1000, 3001)))
    assert (report.answers, report.errors) == (1296, 10)
    assert (report.seconds, report.cpu) == (1.0, 0.5)
    assert (report.p50, report.p99) == (2.0, 2.98)


def test_what_nobody_answered_took_no_time() -> None:
    report = h2load_report(H2loadTraffic(0, 0, 0), 105, H2loadTimes(1.0, 0.5, np.array([], np.int64)))
    assert (report.answers, report.p50, report.p99) == (0, 0.0, 0.0)


def test_tools_that_end_without_a_summary_are_told() -> None:
    with pytest.raises(Unavailable, match=r"wrk ended without a summary(.|\n)*0 requests in 1.01s"):
        read_wrk(DEAD)
    with pytest.raises(Unavailable, match=r"h2load ended without a summary"):
        read_h2load("starting benchmark...\n")
