"""Which of several replicas a request goes to: a pure rule. Knows nothing of how loads and caches are known.

The cost of a replica is what it has to do before and for the request, in prompt tokens, as in the KV router of NVIDIA
Dynamo: prompts it has not computed yet, and a share for every request it is at, less what it saves on this prompt. One
process sends all requests and so counts exactly: no draw between two is needed against old news.
"""

from collections.abc import Sequence
from typing import NamedTuple

TOKENS_PER_REQUEST = 256
"""What a request that a replica is at counts, in prompt tokens, for the tokens that it will generate."""

MAX_EXTRA_WORK = 16 * TOKENS_PER_REQUEST
"""How much busier than the least busy a replica may be, in prompt tokens, and still be chosen for what it has."""

_SAVED = 2
"""What a cached token of the prompt saves: itself, and as much to those who come after this request.
`python -m charonia.bench.replicas` shows what less or more of it does to hits and latency."""

_PART = 4
"""Less than one in so many tokens of a prompt is no reason: every chat begins with the same few, and all would go to
one replica while the caches of the others stay empty (SGLang's router has such a threshold)."""


class ReplicaCandidate(NamedTuple):
    """A replica that could take a request, in tokens: the `work` ahead of it, how much of the prompt is `cached`
    there, and how much of all prompts is `kept` there. `sibling`: it has the whole prompt, for another of its answers.
    """

    work: int
    cached_tokens: int = 0
    kept_tokens: int = 0
    has_sibling: bool = False


def choose_replica(prospects: Sequence[ReplicaCandidate], prompt: int) -> int:
    """The index of the cheapest for a prompt of so many tokens; between equals, of the emptiest cache.

    Never one that has more than `MAX_EXTRA_WORK` of work beyond the least busy; without anything cached, one of the
    least busy.
    """

    def cost(index: int) -> tuple[int, int]:
        prospect = prospects[index]
        return prospect.work - _worth(prospect, prompt), prospect.kept_tokens

    return min(range(len(prospects)), key=cost)


def _worth(prospect: ReplicaCandidate, prompt: int) -> int:
    """Work that a replica may be ahead by for what it has of the prompt."""
    if prospect.has_sibling:
        return MAX_EXTRA_WORK
    return min(prospect.cached_tokens * _SAVED, MAX_EXTRA_WORK) if prospect.cached_tokens * _PART >= prompt else 0
