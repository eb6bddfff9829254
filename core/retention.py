"""What a request asks to keep of its cache for those that follow in its session."""

import msgspec

USUAL_PRIORITY = 35
"""Of what nothing is said, as TensorRT-LLM has it: more is retained, less makes room first."""


class RetentionRange(msgspec.Struct, frozen=True, array_like=True):
    """How tokens `start` up to but not including `end` of a sequence are to be kept; None: up to its end."""

    start: int = 0
    end: int | None = None
    priority: int = USUAL_PRIORITY
    seconds: float | None = None
    """How long after the sequence's end; None: as long as the server allows."""


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """What is to be kept of a sequence for its `scope`: of ranges that overlap the first counts."""

    scope: str
    ranges: tuple[RetentionRange, ...] = ()
    generated: RetentionRange | None = None
    """Of generated tokens, in place of the ranges; its `start` and `end` mean nothing."""

    def at(self, position: int, prompt: int) -> RetentionRange | None:
        """What is asked for the token at a position, of a sequence with a prompt of so many tokens."""
        if self.generated is not None and position >= prompt:
            return self.generated
        covering = (
            part for part in self.ranges if part.start <= position and (part.end is None or position < part.end)
        )
        return next(covering, None)
