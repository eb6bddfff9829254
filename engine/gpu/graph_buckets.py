"""The buckets of steps that are recorded: how much a graph has room for, and which one a step fits into."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

GRAPH_BYTES = 4 << 20
"""Memory that CUDA keeps for one graph, about 10 KiB a node, beside torch's tensors; twice that with adapters, whose
kernels are nodes, too."""

_SHORT_CONTEXT, _CONTEXT_RATIO = 8192, 4
_PLAIN_SIZES = (1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32))
_OTHER_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
_PROMPT_SIZES = (*range(64, 513, 64), *range(640, 2049, 128), *range(2560, 8193, 512))
"""A padded place costs a token's products; up to about 200 places these take as long as the weights are read."""


class GraphKey(NamedTuple):
    """A bucket of steps."""

    context: int
    """The most tokens of a sequence."""
    adapted: bool
    """Whether rows may have adapters."""
    most: int
    """The most places of one row that decodes, which has several with drafts."""
    places: int
    """The most places of the step."""
    prompts: bool = False
    """Whether rows may be parts of prompts, of any number of places."""


class StepExtent(NamedTuple):
    """What decides the bucket of a step."""

    places: int
    longest: int
    """Tokens of its longest sequence."""
    most: int = 1
    """The most places of a row that decodes."""
    adapted: bool = False
    prompts: bool = False
    """Whether some of its rows are parts of prompts."""
    rows: int = 0
    logits: int = 0
    """Places with logits, of a step with parts of prompts; of others all are."""


class GraphBuckets(NamedTuple):
    """The sizes that steps are padded to, ascending."""

    rows: tuple[int, ...]
    """Places of steps whose rows have one each and no adapter."""
    contexts: tuple[int, ...]
    """Lengths of sequences."""
    others: tuple[int, ...] = ()
    """Places of steps with drafts or adapters, which have fewer buckets."""
    most: int = 1
    """The most places of a row that decodes."""
    adapters: int = 0
    """The most different adapters of a step."""
    prompts: tuple[int, ...] = ()
    """Places of steps with parts of prompts."""

    @classmethod
    def of_limits(
        cls, most_rows: int, longest: int, most: int = 1, adapters: int = 0, prompt_places: int = 0
    ) -> "GraphBuckets":
        """The buckets for steps of up to `most_rows` rows, and sequences of up to `longest` tokens; of steps with parts
        of prompts, for up to `prompt_places`."""
        contexts = [_SHORT_CONTEXT]
        while contexts[-1] < longest:
            contexts.append(contexts[-1] * _CONTEXT_RATIO)
        others = _sizes_to(most_rows * most, _OTHER_SIZES) if most > 1 or adapters else ()
        prompts = _sizes_to(prompt_places, _PROMPT_SIZES) if prompt_places else ()
        return cls(_sizes_to(most_rows, _PLAIN_SIZES), (*contexts[:-1], longest), others, most, adapters, prompts)

    @property
    def keys(self) -> list[GraphKey]:
        """All buckets, in the order of their captures: short contexts first, and last of these the steps with parts of
        prompts. The largest logits come first: graphs share a pool, where a smaller buffer goes into what a larger one
        has left, and a larger one takes memory that nobody gives back."""
        kinds = [(False, self.most), (False, 1), (True, self.most), (True, 1)]
        kinds = [*dict.fromkeys(kinds[: 4 if self.adapters else 2])]
        return [
            GraphKey(context, adapted, most, places, prompts)
            for context in self.contexts
            for prompts in ((False, True) if self.prompts else (False,))
            for adapted, most in kinds
            for places in reversed(self.prompts if prompts else self._sizes(adapted, most))
            if places > 1 or most == 1
        ]

    def _sizes(self, adapted: bool, most: int) -> tuple[int, ...]:
        return self.others if adapted or most > 1 else self.rows

    @property
    def usual_keys(self) -> list[GraphKey]:
        """The buckets of short contexts without adapters."""
        return [key for key in self.keys if key.context == self.contexts[0] and not key.adapted]

    @property
    def largest_keys(self) -> list[GraphKey]:
        """Those whose steps take the most memory: one without parts of prompts, and one with them."""
        kind = self.contexts[-1], bool(self.adapters), self.most
        largest = [GraphKey(*kind, self.lines)]
        return [*largest, GraphKey(*kind, self.prompts[-1], prompts=True)] if self.prompts else largest

    @property
    def lines(self) -> int:
        """The most rows, and the most places with logits."""
        return max(self.rows + self.others)

    @property
    def places(self) -> int:
        return max(self.rows + self.others + self.prompts)

    @property
    def bytes(self) -> int:
        """Memory of all graphs, without their outputs."""
        return sum(GRAPH_BYTES << key.adapted for key in self.keys)

    def rows_of(self, key: GraphKey) -> int:
        """The most rows of a bucket's steps."""
        return self.rows[-1] if key.prompts else key.places

    def logits_of(self, key: GraphKey) -> int:
        """The most places with logits of a bucket's steps. With parts of prompts not all have some; as many as there
        are places would be all places, in their order."""
        if not key.prompts:
            return key.places
        return min(self.rows[-1] if key.most == 1 else self.lines, key.places - 1)

    def find(self, step: StepExtent) -> GraphKey | None:
        """The bucket of a step; None for one that is too large."""
        most = self.most if step.most > 1 else 1
        size = _bucket(step.places, self.prompts if step.prompts else self._sizes(step.adapted, most))
        context = _bucket(step.longest, self.contexts)
        if size is None or context is None or step.most > self.most or (step.adapted and not self.adapters):
            return None
        key = GraphKey(context, step.adapted, most, size, step.prompts)
        fits = step.rows <= self.rows_of(key) and step.logits <= self.logits_of(key)
        return key if fits else None


def _sizes_to(most: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes below `most`, and `most`, or the largest size if that is less."""
    most = min(most, sizes[-1])
    return (*(size for size in sizes if size < most), most)


def _bucket(size: int, buckets: Sequence[int]) -> int | None:
    """The smallest of ascending `buckets` that `size` fits into."""
    at = bisect_left(buckets, size)
    return buckets[at] if at < len(buckets) else None
