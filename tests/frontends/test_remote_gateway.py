"""What a frontend's gateway does where nothing of a real hub is needed."""

from charonia.core.request import SamplingParams
from charonia.frontends.messages import EndedRequests, FromFrontend, SentSequence
from charonia.frontends.remote_gateway import RemoteGateway
from charonia.processes.shared_arena import new_arena_file
from charonia.telemetry.loop_lag import LoopLag
from charonia.telemetry.shared_state import SharedState


async def test_an_end_is_told_even_if_what_was_asked_cannot_be() -> None:
    """A client's text may be none that msgpack has: the request's place is free anyhow."""
    files = new_arena_file(1 << 20), new_arena_file(1 << 20)
    gateway = RemoteGateway(SharedState(), files, 1.0, LoopLag(1.0))
    sent: list[FromFrontend] = []
    gateway.send = sent.append
    sampling = SamplingParams(stop=("\ud800",))
    asked = SentSequence(0, sampling, 0.0, None, None, None, None, None, None, 0, None, None)
    gateway._on_unsendable(EndedRequests([7], [], [(7, [asked])]), UnicodeError())
    assert sent == [EndedRequests([7], [])]
