"""What the hashes of a sequence's blocks stand for, as followers of the cache are told. Called for these alone."""

from ...kvcache.events.cache_events import BlockContent, ExtraKey
from ..sequence import Sequence, SequenceSpec


def block_contents(sequence: Sequence, first: int, end: int, size: int) -> list[BlockContent]:
    """What the sequence's full blocks from `first` up to but not including `end`, of `size` tokens, stand for."""
    spec, prompt = sequence.spec, len(sequence.spec.prompt)
    of_prompt: list[int] = spec.prompt[first * size : end * size].tolist()
    tokens = of_prompt + sequence.outputs[max(first * size - prompt, 0) : max(end * size - prompt, 0)]
    contents: list[BlockContent] = []
    for number in range(first, end):
        parent = sequence.hashes[number - 1] if number else None
        of_block = tuple(tokens[(number - first) * size : (number + 1 - first) * size])
        keys = extra_keys(spec, number * size, (number + 1) * size)
        contents.append(
            BlockContent(sequence.hashes[number], parent, of_block, spec.adapter_name or spec.adapter, keys)
        )
    return contents


def extra_keys(spec: SequenceSpec, start: int, end: int) -> tuple[ExtraKey, ...]:
    """What the hash of the block of these positions depends on beside its tokens and the blocks before it, in vLLM's
    order. A tenant's salt tells where its name ends, for tenants share no blocks."""
    adapter = spec.adapter_name or spec.adapter
    keys: list[ExtraKey] = [adapter] if adapter else []
    spans = (span for span in spec.embedded if span.start < end and start < span.end)
    keys += ((span.digest.hex(), span.start - start) for span in spans)
    if start == 0 and spec.encoded is not None:
        keys.append(spec.encoded.digest.hex())
    if start == 0 and (spec.salt or spec.tenant):
        keys.append(f"{len(spec.tenant)}:{spec.tenant}{spec.salt}" if spec.tenant else spec.salt)
    return tuple(keys)
