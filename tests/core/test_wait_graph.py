"""Waits that can never end, among instances that are made up."""

from collections.abc import Sequence

from charonia.core.errors import CharoniaError
from charonia.core.request_context import ENSEMBLE_ENDPOINT, RequestContext
from charonia.core.wait_graph import AwaitedCall, InstanceWaits, QueueWaits, WaitGraph, find_cycle


class Refusals(list[str]):
    """The errors that calls were refused with."""

    def call(self, request: RequestContext) -> AwaitedCall:
        return AwaitedCall(request, self.add)

    def add(self, error: CharoniaError) -> None:
        self.append(error.message)


def instance(name: str, executes: RequestContext | None, *awaits: RequestContext) -> InstanceWaits:
    return InstanceWaits(name, [] if executes is None else [executes], [Refusals().call(each) for each in awaits])


def cycle(*queues: QueueWaits) -> list[str]:
    return [wait.instance.name for wait in find_cycle(queues)]


def request(parent: RequestContext | None = None) -> RequestContext:
    """Of a client or, with a parent, of an ensemble."""
    return RequestContext("python") if parent is None else parent.child(ENSEMBLE_ENDPOINT)


def test_two_that_ask_each_other_wait_for_ever() -> None:
    asked, back = request(), request()
    a = QueueWaits([instance("a", request(), asked)], [back])
    b = QueueWaits([instance("b", asked, back)], [])
    assert sorted(cycle(a, b)) == ["a", "b"]


def test_one_that_asks_itself_waits_for_ever_also_through_an_ensemble() -> None:
    asked = request()
    assert cycle(QueueWaits([instance("a", request(), asked)], [asked])) == ["a"]
    assert cycle(QueueWaits([instance("a", request(), asked)], [request(request(asked))])) == ["a"]
    not_needed = RequestContext("python", parent=asked)
    assert cycle(QueueWaits([instance("a", request(), asked)], [not_needed])) == []


def test_a_wait_ends_where_any_instance_may_take_the_request() -> None:
    asked, back, other = request(), request(), request()
    b = QueueWaits([instance("b", asked, back)], [])
    busy = instance("a_1", request())
    assert cycle(QueueWaits([instance("a_0", request(), asked), busy], [back]), b) == []
    waits_too = instance("a_1", request(), other)
    both = QueueWaits([instance("a_0", request(), asked), waits_too], [back])
    assert cycle(both, b) == []  # whoever has `other` is not known to wait
    assert sorted(cycle(both, b, QueueWaits([instance("c", other, request(), asked)], []))) == ["a_0", "b"]


def test_one_that_only_leads_to_a_cycle_is_not_in_it() -> None:
    first, asked, back = request(), request(), request()
    c = QueueWaits([instance("c", request(), first)], [])
    a = QueueWaits([instance("a", first, asked)], [back])
    b = QueueWaits([instance("b", asked, back)], [])
    for queues in ((c, a, b), (b, a, c)):
        assert sorted(cycle(*queues)) == ["a", "b"]


class Model:
    def __init__(self, *queues: QueueWaits) -> None:
        self._queues = queues

    def queue_waits(self) -> Sequence[QueueWaits]:
        return self._queues


async def test_the_newest_request_that_is_queued_is_refused_and_told_the_cycle() -> None:
    refused, asked, back = Refusals(), request(), request()
    graph = WaitGraph()
    a = Model(QueueWaits([InstanceWaits("a_0", [request()], [refused.call(asked)])], [back]))
    b = Model(QueueWaits([InstanceWaits("b_0", [asked], [refused.call(back)])], []))
    graph.add_model(a)
    graph.check()
    assert refused == []
    graph.add_model(b)
    graph.check()
    [message] = refused
    assert "instance 'a_0' waits for 'b_0'" in message
    assert "instance 'b_0' waits for 'a_0'" in message
    graph.remove_model(a)
    graph.remove_model(b)
    graph.check()
    assert len(refused) == 1
