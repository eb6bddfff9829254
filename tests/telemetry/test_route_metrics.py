"""What is counted of an arm's requests."""

from charonia.core.metrics import Histogram
from charonia.core.request_context import DONE, Outcome, RequestContext, RequestEnd
from charonia.telemetry.route_metrics import ArmMetrics


def ended(end: RequestEnd, seconds: float) -> RequestContext:
    context = RequestContext("infer")
    context.end, context.ended_at = end, context.arrived_at + seconds
    return context


def test_answers_have_latencies_and_others_have_not() -> None:
    arm, failed = ArmMetrics(), RequestEnd(Outcome.ERROR, "internal")
    assert arm.statistics().last_inference == 0
    for end, seconds in ((DONE, 0.002), (DONE, 0.2), (failed, 3.0)):
        arm.count(end, ended(end, seconds))
    found = {(reading.family, reading.labels.get("outcome")): reading.value for reading in arm.readings("r")}
    assert {reading.labels["route"] for reading in arm.readings("r")} == {"r"}
    assert found["charonia_route_requests_total", "done"] == 2
    assert found["charonia_route_requests_total", "error"] == 1
    seconds, first = (found[f"charonia_route_{name}_seconds", None] for name in ("request", "time_to_first_token"))
    assert isinstance(seconds, Histogram)
    assert isinstance(first, Histogram)
    assert (sum(seconds.counts), round(seconds.sum, 6), sum(first.counts)) == (2, 0.202, 0)
    said = arm.statistics()
    assert (said.inference.success.count, round(said.inference.success.ns, -3)) == (2, 202_000_000)
    assert (said.inference.fail.count, round(said.inference.fail.ns, -3)) == (1, 3_000_000_000)
    assert said.last_inference > 0
