"""The deadlines of sequences. Knows no clock."""

from math import inf


class Deadlines:
    """A deadline for each key, in seconds of the caller's clock. Asking is O(1) while none has passed."""

    def __init__(self) -> None:
        self.by_key: dict[int, float] = {}
        """From which any key may be taken out."""
        self._earliest = inf  # or earlier, where its key was taken out

    def set(self, key: int, deadline: float) -> None:
        self.by_key[key] = deadline
        self._earliest = min(self._earliest, deadline)

    def pop_expired(self, now: float) -> list[int]:
        """Remove the keys whose deadline has passed, the earliest first."""
        if now < self._earliest:
            return []
        passed = sorted((deadline, key) for key, deadline in self.by_key.items() if deadline <= now)
        for _, key in passed:
            del self.by_key[key]
        self._earliest = min(self.by_key.values(), default=inf)
        return [key for _, key in passed]
