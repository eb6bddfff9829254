"""Which requests have run out of time. Keys and seconds only; the clock is the caller's."""

from heapq import heappop, heappush


class Deadlines:
    """A deadline per key; looking costs nothing while none has passed."""

    def __init__(self) -> None:
        self._of: dict[int, float] = {}
        self._line: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._of)

    def set(self, key: int, deadline: float) -> None:
        """The key has until `deadline`, in seconds of the caller's clock."""
        self._of[key] = deadline
        heappush(self._line, (deadline, key))

    def discard(self, key: int) -> None:
        """The key has ended; unknown ones are ignored."""
        self._of.pop(key, None)
        if len(self._line) > 2 * len(self._of) + 64:
            self._line = sorted((deadline, key) for key, deadline in self._of.items())

    def pop_expired(self, now: float) -> list[int]:
        """Keys whose time is over, dropped."""
        passed: list[int] = []
        while self._line and self._line[0][0] <= now:
            deadline, key = heappop(self._line)
            if self._of.get(key) == deadline:
                del self._of[key]
                passed.append(key)
        return passed
