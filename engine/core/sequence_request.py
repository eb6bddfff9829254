"""What becomes of a request before the step loop sees it: checked, hashed, its key made unique.

Runs outside the step. Knows nothing of sockets or of what is running.
"""

from collections.abc import Sequence

import numpy as np

from ...core.errors import InvalidArgument
from ...kvcache.manager import KVCacheManager
from ...scheduler.sequence import SequenceRequest
from .messages import AddRequest
from .request_keys import scheduler_key


def to_sequence_request(add: AddRequest, vocab_size: int, cache: KVCacheManager) -> SequenceRequest:
    """What the scheduler takes, block hashes included; lengths are the scheduler's to judge.

    Raises:
        InvalidArgument: a prompt token is outside the vocabulary.
    """
    check_vocabulary(add.prompt, vocab_size)
    prompt = np.array(add.prompt, dtype=np.int32)
    extras = (add.adapter, add.tenant, add.salt)
    return SequenceRequest(
        key=scheduler_key(add.client, add.key),
        prompt=prompt,
        max_tokens=add.max_tokens,
        hashes=cache.digest(prompt, extras),
        sampling=add.sampling,
        stop_token_ids=frozenset(add.stop_token_ids),
        priority=add.priority,
        tenant=add.tenant,
        weight=add.weight,
        extras=extras,
    )


def check_vocabulary(tokens: Sequence[int], vocab_size: int, field: str = "prompt") -> None:
    """Raises `InvalidArgument` for a token of `field` that the model does not know."""
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < vocab_size:
            raise InvalidArgument(
                f"{field}: token id {token} is outside the vocabulary of {vocab_size} tokens", field=field
            )
