"""Service by tenant: who was served least is next. Knows no rows, no steps but their numbers, and not what serves."""

import numpy as np

from ..plan import LongArray
from ..sequence import Sequence

OUTPUT_WEIGHT = 2.0
"""A generated token counts as much as so many computed prompt tokens, as in the paper."""

_NOT_WAITING = 1 << 62
_FIRST_SLOTS = 8


class Fairness:
    """A virtual token counter per tenant, after Sheng et al., "Fairness in Serving Large Language Models" (2024).

    Tenants are numbered by slots, in arrays: choosing one is a handful of array operations however many there are.
    Among those whose first waiting sequence has the same class, the one served least is next.
    """

    def __init__(self, ageing_steps: int, credit: float) -> None:
        """`ageing_steps`: of waiting, by which a sequence counts as of the next more urgent class. `credit`: the most,
        in the unit of `service`, that a tenant may save that asks for less than its share; an idle tenant saves
        none."""
        self._ageing_steps = ageing_steps
        self._credit = credit
        self._slots: dict[str, int] = {}
        self._live: list[int] = []
        self._last_service = 0.0  # of the last tenant in the queue, when it became empty
        self.service = np.zeros(_FIRST_SLOTS)
        """By slot: weighted tokens computed for a tenant, divided by the tenant's weight."""
        self._weights = np.ones(_FIRST_SLOTS)
        self._seniority = np.full(_FIRST_SLOTS, _NOT_WAITING)  # of the first of each tenant's waiting sequences
        self._ranks = np.full(_FIRST_SLOTS, _NOT_WAITING)

    @property
    def single_tenant(self) -> bool:
        """Whether there has been one tenant at most: nothing needs to be counted."""
        return len(self._slots) < 2

    def slot_of(self, tenant: str, weight: float) -> int:
        """The tenant's number; the latest weight holds."""
        slot = self._slots.setdefault(tenant, len(self._slots))
        if slot == len(self._live):
            self._live.append(0)
        if slot == len(self.service):
            self.service = np.concatenate([self.service, np.zeros(slot)])
            self._weights = np.concatenate([self._weights, np.ones(slot)])
            self._seniority = np.concatenate([self._seniority, np.full(slot, _NOT_WAITING)])
            self._ranks = np.concatenate([self._ranks, np.full(slot, _NOT_WAITING)])
        self._weights[slot] = weight
        return slot

    def sequence_arrived(self, slot: int) -> None:
        """Count a sequence that is about to be enqueued. A tenant without a waiting one is lifted to the one served
        least: service it did not ask for is no credit, but for a little while it has a sequence running. Without that,
        a tenant that asks for just its share would lose a bit of it in each pause."""
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

    def charge_outputs(self, slots: list[int], counts: list[int]) -> None:
        """Count `counts[i]` tokens generated for the tenant `slots[i]`; one may appear several times."""
        tokens = np.bincount(slots, weights=counts, minlength=len(self.service))
        self.service += OUTPUT_WEIGHT * tokens / self._weights

    def set_head(self, slot: int, head: Sequence | None) -> None:
        """The tenant's first waiting sequence is now this one."""
        if head is not None:
            self._seniority[slot], self._ranks[slot] = head.seniority, head.rank
        else:
            self._seniority[slot] = self._ranks[slot] = _NOT_WAITING
            self._last_service = float(self.service[slot])

    def next_tenants(self, now: int, by_rank: bool, among: list[int] | None = None) -> list[int]:
        """Waiting tenants, or those `among` them, that are next at step `now`: those served least, or those whose first
        sequence has the lowest rank. Several where they are alike."""
        if by_rank:
            ranks = _only(among, self._ranks)
            return np.flatnonzero(ranks == ranks.min()).tolist()
        classes = np.maximum(0, -((now - _only(among, self._seniority)) // self._ageing_steps))
        service = np.where(classes == classes.min(), self.service, np.inf)
        return np.flatnonzero(service == service.min()).tolist()

    def fair_share_key(self, sequence: Sequence, now: int) -> tuple[int, float]:
        """(class, service), which decide between sequences of two tenants, the lower first."""
        urgency = max(0, -((now - sequence.seniority) // self._ageing_steps))
        return urgency, float(self.service[sequence.tenant_slot])


def _only(slots: list[int] | None, values: LongArray) -> LongArray:
    """The values of these slots, as if no other tenant waited."""
    if slots is None:
        return values
    kept = np.full_like(values, _NOT_WAITING)
    kept[slots] = values[slots]
    return kept
