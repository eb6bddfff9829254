"""Which tenant is next: a virtual token counter per tenant.

After Sheng et al., "Fairness in Serving Large Language Models" (2024). Knows tenants, classes and tokens; no rows,
blocks or budgets. Tenants are numbered by slots, in arrays: choosing one is a handful of array operations however many
there are, and with one tenant nothing at all.
"""

import numpy as np
from numpy.typing import NDArray

OUTPUT_WEIGHT = 2.0
"""A generated token counts as much as so many computed prompt tokens, as in the paper."""

_NOT_WAITING = 1 << 62
_FIRST_SLOTS = 8


class Fairness:
    """`service[slot]`: weighted tokens computed for a tenant, divided by the tenant's weight.

    Among tenants whose first waiting sequence has the same class, the one served least is next. A class is counted in
    `ageing_steps` from now: a sequence that waited long enough to be as urgent as the most urgent class counts as of
    that class. `credit`: the most, in the unit of `service`, that a tenant may save that asks for less than its share;
    an idle tenant saves none.
    """

    def __init__(self, ageing_steps: int, credit: float) -> None:
        self._ageing_steps = ageing_steps
        self._credit = credit
        self._slots: dict[str, int] = {}
        self._last_service = 0.0  # of the last tenant in the queue, when it became empty
        self.service = np.zeros(_FIRST_SLOTS)
        self._weights = np.ones(_FIRST_SLOTS)
        self._live = [0] * _FIRST_SLOTS
        self._seniority = np.full(_FIRST_SLOTS, _NOT_WAITING)  # of the first in each line
        self._ranks = np.full(_FIRST_SLOTS, _NOT_WAITING)

    @property
    def single_tenant(self) -> bool:
        """Whether there has been one tenant at most: nothing needs to be counted."""
        return len(self._slots) < 2

    def slot_of(self, tenant: str, weight: float) -> int:
        """The tenant's number; the latest weight holds."""
        slot = self._slots.setdefault(tenant, len(self._slots))
        if slot == len(self.service):
            self.service = np.concatenate([self.service, np.zeros(slot)])
            self._weights = np.concatenate([self._weights, np.ones(slot)])
            self._live += [0] * slot
            self._seniority = np.concatenate([self._seniority, np.full(slot, _NOT_WAITING)])
            self._ranks = np.concatenate([self._ranks, np.full(slot, _NOT_WAITING)])
        self._weights[slot] = weight
        return slot

    # Service

    def sequence_arrived(self, slot: int) -> None:
        """Count a sequence that is about to be enqueued.

        A tenant without a waiting sequence is lifted to the one served least: service it did not ask for is no credit,
        but for a little while it has a sequence running. Without that, a tenant that asks for just its share would lose
        a bit of it in each pause.
        """
        self._live[slot] += 1
        if self._seniority[slot] != _NOT_WAITING:
            return
        waiting = self.service[self._seniority != _NOT_WAITING]
        floor = waiting.min() if len(waiting) else self._last_service
        credit = self._credit if self._live[slot] > 1 else 0.0
        self.service[slot] = max(self.service[slot], floor - credit)

    def sequence_ended(self, slot: int) -> None:
        self._live[slot] -= 1

    def charge_prompt(self, slot: int, tokens: int) -> None:
        """Count prompt tokens computed for a tenant."""
        if not self.single_tenant:
            self.service[slot] += tokens / self._weights[slot]

    def charge_outputs(self, slots: NDArray[np.int32], rows: list[int], counts: list[int]) -> None:
        """Count `counts[i]` tokens generated for the tenant `slots[rows[i]]`; one may appear several times."""
        if not self.single_tenant and rows:
            tokens = np.bincount(slots[rows], weights=counts, minlength=len(self.service))
            self.service += OUTPUT_WEIGHT * tokens / self._weights

    # Turns

    def set_head(self, slot: int, seniority: int, rank: int) -> None:
        """The tenant's first waiting sequence is of this seniority and rank."""
        self._seniority[slot], self._ranks[slot] = seniority, rank

    def clear_head(self, slot: int) -> None:
        """The tenant has no waiting sequence any more."""
        self._seniority[slot] = self._ranks[slot] = _NOT_WAITING
        self._last_service = float(self.service[slot])

    def least_served(self, now: int, among: list[int] | None = None) -> list[int]:
        """Waiting tenants, or those `among` them, that are next at step `now`: several where they were served alike."""
        classes = self._classes(_only(among, self._seniority), now)
        service = np.where(classes == classes.min(), self.service, np.inf)
        slots: list[int] = np.flatnonzero(service == service.min()).tolist()
        return slots

    def lowest_ranked(self, among: list[int] | None = None) -> list[int]:
        """Waiting tenants, or those `among` them, whose first sequence has the lowest rank of all."""
        ranks = _only(among, self._ranks)
        slots: list[int] = np.flatnonzero(ranks == ranks.min()).tolist()
        return slots

    def fair_share_key(self, slot: int, seniority: int, now: int) -> tuple[int, float]:
        """(class, service), which decide between two tenants, the lower first."""
        return max(0, -((now - seniority) // self._ageing_steps)), float(self.service[slot])

    def fair_share_keys(
        self, slots: NDArray[np.int32], seniority: NDArray[np.int64], now: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The keys of several sequences; zero where all are one tenant's, whose own order decides then."""
        if (slots == slots[:1]).all():
            return np.zeros(len(slots), np.int64), np.zeros(len(slots))
        return self._classes(seniority, now), self.service[slots]

    def _classes(self, seniority: NDArray[np.int64], now: int) -> NDArray[np.int64]:
        classes: NDArray[np.int64] = np.maximum(0, -((now - seniority) // self._ageing_steps))
        return classes


def _only(slots: list[int] | None, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values of these slots, as if no other tenant waited."""
    if slots is None:
        return values
    kept = np.full_like(values, _NOT_WAITING)
    kept[slots] = values[slots]
    return kept
