"""What the layers of a model keep of a sequence: all of its tokens, or the last ones.

Layers are divided into groups that keep about equally much, so that a block, which is of one group, takes the same
memory whatever group it is of: all of them share a pool, and what each gets follows the demand.
"""

from typing import NamedTuple


class LayerGroups(NamedTuple):
    """`full` groups, which keep every token, then `sliding` ones, which keep what later tokens still see. The blocks
    that all of them have of the same tokens are a span."""

    full: int = 1
    sliding: int = 0
    window: int = 0
    """A token of a sliding layer attends to so many of the last tokens, itself included."""
    in_flight: int = 0
    """Tokens of all sequences that plans in flight may compute together: sliding layers keep them until they are
    computed."""

    @property
    def total(self) -> int:
        return self.full + self.sliding

    def window_spans(self, block_size: int) -> int:
        """Spans with what the first token after them sees in a sliding layer."""
        return -(-max(self.window - 1, 0) // block_size)


ONE_GROUP = LayerGroups()
"""All layers keep every token."""


def last_end(most: int, ends: list[int] | None) -> int:
    """The last of these ends that is not beyond `most`; those that are, are taken out."""
    if ends is None:
        return most
    while ends and ends[-1] > most:
        ends.pop()
    return ends[-1] if ends else 0
