"""The sequences of a worker, which the hub's engines compute: what the hub tells of them is written into their
streams."""

from ..core.errors import CharoniaError
from ..core.request import FinishReason
from ..engine.client.token_stream import TokenStream, push_step
from .sequence_messages import SequenceSteps


class RemoteStreams:
    """The sequences of this worker that the hub's engines have, by their keys."""

    def __init__(self) -> None:
        self._streams: dict[int, TokenStream] = {}

    def add(self, key: int, stream: TokenStream) -> None:
        self._streams[key] = stream

    def remove(self, key: int) -> None:
        self._streams.pop(key).close()

    def fail(self, key: int, error: CharoniaError) -> None:
        """End one with an error, if it is read."""
        if key in self._streams:
            self._streams[key].fail(error)

    def on_steps(self, steps: SequenceSteps) -> None:
        """Write what the hub tells of into the streams."""
        streams, at = self._streams, steps.at
        for key, cached, begun in steps.started:
            if key in streams:
                streams[key].start(cached, begun)
        for key, held in steps.held:
            if key in streams:
                streams[key].stats.held = held
        for key, scores in steps.prompt_logprobs:
            if key in streams:
                for tokens_scores in scores:
                    streams[key].push_prompt_scores(tokens_scores)
        for key, drafts in steps.drafts:
            if key in streams:
                streams[key].stats.drafts += drafts
        for key, part in push_step(streams, steps.keys, steps.counts, steps.tokens, steps.logprobs, at):
            if tokens := steps.tokens[part]:
                streams[key].push(tokens, at, steps.logprobs[part])
        for key, reason in steps.finished:
            if key in streams:
                streams[key].finish(FinishReason(reason))
        for key, error in steps.failed:
            self.fail(key, error.error())
