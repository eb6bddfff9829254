"""The delay before a process that was lost is started again."""


class RestartBackoff:
    """`first` seconds, doubled with each loss up to `longest`, and `first` again after a process that worked for at
    least `stable` seconds."""

    def __init__(self, first: float, longest: float, stable: float) -> None:
        self._first, self._longest, self._stable = first, longest, stable
        self._delay = 0.0

    def next_delay(self, worked: float = 0.0) -> float:
        """Seconds to wait now; the lost process `worked` for so many seconds, 0 if it did not even start."""
        if worked >= self._stable or not self._delay:
            self._delay = self._first
        else:
            self._delay = min(self._longest, 2.0 * self._delay)
        return self._delay
