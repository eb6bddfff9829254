"""Whose turn it is: a virtual token counter per tenant.

After Sheng et al., "Fairness in Serving Large Language Models" (2024). Knows tenants, classes and tokens; no rows,
blocks or budgets. Tenants are numbered by slots, in arrays: choosing one is a handful of array operations however many
there are, and with one tenant nothing at all.
"""

import numpy as np
from numpy.typing import NDArray

OUTPUT_WEIGHT = 2.0
"""A generated token counts as much as so many computed prompt tokens, as in the paper."""

_NEVER = 1 << 62
_FIRST_SLOTS = 8


class Fairness:
    """`served[slot]`: weighted tokens computed for a tenant, divided by the tenant's weight.

    Among those whose first in line has the same class, whoever was served least is next. A class is counted in
    `ageing_steps` from now: what waited long enough to be as urgent as the most urgent class counts as that. `credit`:
    the most, in the unit of `served`, that a tenant may save who asks for less than his share; idle, he saves none.
    """

    def __init__(self, ageing_steps: int, credit: float) -> None:
        self._ageing_steps = ageing_steps
        self._credit = credit
        self._slots: dict[str, int] = {}
        self._last = 0.0  # what the last tenant had been served when nobody waited any more
        self.service = np.zeros(_FIRST_SLOTS)
        self._weights = np.ones(_FIRST_SLOTS)
        self._live = [0] * _FIRST_SLOTS
        self._seniority = np.full(_FIRST_SLOTS, _NEVER)  # of the first in each line; never: nobody waits
        self._ranks = np.full(_FIRST_SLOTS, _NEVER)

    @property
    def single_tenant(self) -> bool:
        """There has been one tenant at most: nothing needs to be counted."""
        return len(self._slots) < 2

    def slot_of(self, tenant: str, weight: float) -> int:
        """The tenant's number; the latest weight holds."""
        slot = self._slots.setdefault(tenant, len(self._slots))
        if slot == len(self.service):
            self._grow()
        self._weights[slot] = weight
        return slot

    def _grow(self) -> None:
        more = len(self.service)
        self.service = np.concatenate([self.service, np.zeros(more)])
        self._weights = np.concatenate([self._weights, np.ones(more)])
        self._live += [0] * more
        self._seniority = np.concatenate([self._seniority, np.full(more, _NEVER)])
        self._ranks = np.concatenate([self._ranks, np.full(more, _NEVER)])

    # Service

    def sequence_arrived(self, slot: int) -> None:
        """One more is about to line up. A tenant who had nobody in line is lifted to who was served least: what he did
        not use is no credit, but for a little while he has somebody running. Without that, who asks for just his share
        would lose a bit of it in each pause."""
        self._live[slot] += 1
        if self._seniority[slot] != _NEVER:
            return
        waiting = self.service[self._seniority != _NEVER]
        floor = waiting.min() if len(waiting) else self._last
        credit = self._credit if self._live[slot] > 1 else 0.0
        self.service[slot] = max(self.service[slot], floor - credit)

    def sequence_ended(self, slot: int) -> None:
        """One has ended, wherever it was."""
        self._live[slot] -= 1

    def charge_prompt(self, slot: int, tokens: int) -> None:
        """That many prompt tokens are computed for him."""
        if not self.single_tenant:
            self.service[slot] += tokens / self._weights[slot]

    def charge_outputs(self, slots: NDArray[np.int32], rows: list[int], counts: list[int]) -> None:
        """`counts[i]` tokens were generated for the tenant `slots[rows[i]]`; one may appear several times."""
        if not self.single_tenant and rows:
            tokens = np.bincount(slots[rows], weights=counts, minlength=len(self.service))
            self.service += OUTPUT_WEIGHT * tokens / self._weights

    # Turns

    def set_head(self, slot: int, seniority: int, rank: int) -> None:
        """Who is now the tenant's first in line."""
        self._seniority[slot], self._ranks[slot] = seniority, rank

    def clear_head(self, slot: int) -> None:
        """Nobody of the tenant's is in line any more."""
        self._seniority[slot] = self._ranks[slot] = _NEVER
        self._last = float(self.service[slot])

    def least_served(self, now: int, among: list[int] | None = None) -> list[int]:
        """Tenants in line, or of these, whose turn it is at step `now`: several where they were served alike."""
        classes = self._classes(_only(among, self._seniority), now)
        served = np.where(classes == classes.min(), self.service, np.inf)
        slots: list[int] = np.flatnonzero(served == served.min()).tolist()
        return slots

    def lowest_ranked(self, among: list[int] | None = None) -> list[int]:
        """Tenants in line, or of these, whose first has the lowest rank of all."""
        ranks = _only(among, self._ranks)
        slots: list[int] = np.flatnonzero(ranks == ranks.min()).tolist()
        return slots

    def fair_share_key(self, slot: int, seniority: int, now: int) -> tuple[int, float]:
        """What decides between two tenants, the lower first: class, then service."""
        return max(0, -((now - seniority) // self._ageing_steps)), float(self.service[slot])

    def fair_share_keys(
        self, slots: NDArray[np.int32], seniority: NDArray[np.int64], now: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The same of several; zero where they are all one tenant's, whose own order decides then."""
        if (slots == slots[:1]).all():
            return np.zeros(len(slots), np.int64), np.zeros(len(slots))
        return self._classes(seniority, now), self.service[slots]

    def _classes(self, seniority: NDArray[np.int64], now: int) -> NDArray[np.int64]:
        classes: NDArray[np.int64] = np.maximum(0, -((now - seniority) // self._ageing_steps))
        return classes


def _only(slots: list[int] | None, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values of these slots; nobody else is in line."""
    if slots is None:
        return values
    kept = np.full_like(values, _NEVER)
    kept[slots] = values[slots]
    return kept
