"""The deadlines of sequences. Knows no clock."""

from math import inf


class Deadlines:
    """A deadline for each key, in seconds of the caller's clock. Asking is O(1) while none has passed."""

    def __init__(self) -> None:
        self._of: dict[int, float] = {}
        self._earliest = inf  # or earlier, where its key was discarded

    def __len__(self) -> int:
        return len(self._of)

    def set(self, key: int, deadline: float) -> None:
        self._of[key] = deadline
        self._earliest = min(self._earliest, deadline)

    def discard(self, key: int) -> None:
        """Forget a key; unknown ones are ignored."""
        self._of.pop(key, None)

    def pop_expired(self, now: float) -> list[int]:
        """Remove the keys whose deadline has passed, the earliest first."""
        if now < self._earliest:
            return []
        passed = sorted((deadline, key) for key, deadline in self._of.items() if deadline <= now)
        for _, key in passed:
            del self._of[key]
        self._earliest = min(self._of.values(), default=inf)
        return [key for _, key in passed]
