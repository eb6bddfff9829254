"""Scopes: what sessions asked to keep of the cache, within a budget.

One record each, over a list of blocks and snapshots of states. The least recently used blocks make room,
of those that no scope retains; where there is no other, a scope's do too: nothing pins a block.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice, pairwise
from math import inf
from time import monotonic
from typing import NamedTuple, TypeAlias

from ...core.retention import USUAL_PRIORITY, Retention
from ..block_table import NO_BLOCK, BlockTable
from ..states.state_pool import StatePool
from .retained_lists import RetainedList, RetainedLists

MOST_SCOPES = 1024
"""Records at a time, each with a list."""

LONGEST_SECONDS = 3600.0
"""The most that a scope is kept after its last sequence."""

_STATES = 2
"""Snapshots of a scope: its next prompt begins with the last, or a little sooner."""

_COMMON = ""
"""In place of a scope's name: what several scopes of a tenant have."""
_COMMON_PRIORITY = 101

ScopeKey: TypeAlias = tuple[str, str]
"""The tenant, who shares no block with others, and the scope's name."""


class RetentionBudget(NamedTuple):
    """The most blocks and snapshots that scopes retain together."""

    blocks: int = 0
    states: int = 0

    @property
    def lists(self) -> int:
        return MOST_SCOPES if self.blocks else 0


NO_RETENTION = RetentionBudget()


class RetainedScope:
    """The record of a scope."""

    __slots__ = ("due", "expires", "key", "number", "priority", "states", "used")

    def __init__(self, key: ScopeKey, number: int) -> None:
        self.key = key
        self.number = number
        """The number of its list of blocks."""
        self.priority = USUAL_PRIORITY
        self.used = 0
        """Counts uses of all scopes: the lowest was used longest ago."""
        self.expires = 0.0
        self.due = inf
        """When it is looked at next, for it may have expired."""
        self.states: tuple[bytes, ...] = ()


class SessionRetention:
    """The scopes of a cache whose spans are `width` blocks of `block_size` tokens; lives in the step loop's thread.
    `clock`: seconds."""

    def __init__(
        self,
        lists: RetainedLists,
        states: StatePool | None,
        block_size: int,
        width: int = 1,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._lists = lists
        self._states = states
        self._block_size = block_size
        self._width = width
        self.clock = clock
        self._scopes: dict[ScopeKey, RetainedScope] = {}
        self._due: list[tuple[float, ScopeKey]] = []
        """A heap of when records are looked at."""
        self._uses = 0
        self.refused_blocks = 0
        """Blocks so far that were to be retained, and for which the budget had no room."""
        self.displaced = 0
        """Scopes that ended so far to make room for others."""

    def __len__(self) -> int:
        return len(self._scopes)

    @property
    def blocks(self) -> int:
        """Blocks that are retained, and that nobody holds."""
        return self._lists.length

    def keep(self, table: BlockTable, hashes: Sequence[bytes], prompt: int, tenant: str, retention: Retention) -> None:
        """A sequence is about to close its table, whose full blocks have these hashes: let its scope have what it asked
        to keep. `prompt`: its prompt's tokens."""
        self.expire()
        spans: list[tuple[int, int]] = []
        priority, seconds = USUAL_PRIORITY, 0.0
        for first, end in pairwise(self._cuts(retention, prompt, table.committed)):
            wish = retention.at(first * self._block_size, prompt)
            if wish is None or wish.priority == USUAL_PRIORITY:
                continue
            if wish.priority < USUAL_PRIORITY:  # others may want what it shared with them
                self._lists.expect_no_use(self._blocks(table, max(first, table.cached // self._block_size), end))
                continue
            spans.append((first, end))
            priority = max(priority, wish.priority)
            seconds = max(seconds, LONGEST_SECONDS if wish.seconds is None else min(wish.seconds, LONGEST_SECONDS))
        if spans and seconds > 0:
            self._retain(table, hashes, spans, (tenant, retention.scope), priority, seconds)

    def _cuts(self, retention: Retention, prompt: int, committed: int) -> list[int]:
        """The spans of a table at which what is asked for may change, the ends included; a block is looked after as its
        first token."""
        tokens = [prompt, *(part.start for part in retention.ranges), *(part.end or 0 for part in retention.ranges)]
        return sorted({0, committed, *(min(-(-token // self._block_size), committed) for token in tokens)})

    def _blocks(self, table: BlockTable, first: int, end: int) -> Iterator[int]:
        blocks = islice(table.blocks, first * self._width, end * self._width)
        return (block for block in blocks if block != NO_BLOCK)

    def _retain(
        self,
        table: BlockTable,
        hashes: Sequence[bytes],
        spans: Sequence[tuple[int, int]],
        key: ScopeKey,
        priority: int,
        seconds: float,
    ) -> None:
        wanted = [block for first, end in spans for block in self._blocks(table, first, end)]
        common, scope = self._record((key[0], _COMMON)), self._record(key)
        if common is None or scope is None:
            self.refused_blocks += len(wanted)
            for record in (common, scope):
                if record is not None and record.due == inf:  # made in vain
                    self._end(record)
            return
        self._uses += 1
        expires = self.clock() + seconds
        self._use(scope, priority, expires)
        self._use(common, _COMMON_PRIORITY, max(common.expires, expires))
        room = self._make_room(scope, len(wanted))
        self.refused_blocks += len(wanted) - room
        self._lists.assign(wanted[:room], scope.number, common.number)
        if self._states is not None:
            end = spans[-1][1]
            before = scope.states
            newest = islice((digest for digest in reversed(hashes[:end]) if digest in self._states), _STATES)
            scope.states = tuple(digest for digest in newest if self._states.retain(digest))
            for digest in before:
                self._states.let_go(digest, wanted=True)

    def _record(self, key: ScopeKey) -> RetainedScope | None:
        """The record of a scope, with a list; None: all are taken by tenants with no more than this one."""
        scope = self._scopes.get(key)
        if scope is not None and scope.number in self._lists.lists:
            return scope
        full = scope is None and len(self._scopes) >= MOST_SCOPES
        number = None if full else self._lists.open_list()
        while number is None:
            records = Counter(tenant for tenant, _ in self._scopes)
            [(greedy, most)] = records.most_common(1)
            if most <= records[key[0]] and greedy != key[0]:
                return None
            others = (scope for scope in self._scopes.values() if scope.key[0] == greedy and scope.key[1] != _COMMON)
            oldest = min(others, key=lambda scope: scope.used, default=None)
            if oldest is None:
                return None
            self._end(oldest)
            self.displaced += 1
            number = self._lists.open_list()
        if scope is None or key not in self._scopes:
            scope = self._scopes[key] = RetainedScope(key, number)
        scope.number = number
        return scope

    def _use(self, scope: RetainedScope, priority: int, expires: float) -> None:
        scope.priority, scope.used, scope.expires = priority, self._uses, expires
        self._lists.lists[scope.number].rank = priority, self._uses
        if expires < scope.due:
            scope.due = expires
            heappush(self._due, (expires, scope.key))
            if len(self._due) > 4 * MOST_SCOPES:  # most are of scopes that have ended
                self._due = sorted((scope.due, scope.key) for scope in self._scopes.values() if scope.due < inf)

    def _make_room(self, scope: RetainedScope, wanted: int) -> int:
        """How many of `wanted` blocks the scope may retain; others that stand back for it end."""
        lists = self._lists
        if lists.most - lists.length < wanted:  # what it has beside this sequence it wants less
            lists.dissolve(scope.number)
            number = lists.open_list()
            assert number is not None
            scope.number = number
            lists.lists[number].rank = scope.priority, scope.used
        while (room := lists.most - lists.length) < wanted:
            other = self._next_to_stand_back(scope, room)
            if other is None:
                return room
            self._end(other)
            self.displaced += 1
        return wanted

    def _next_to_stand_back(self, scope: RetainedScope, room: int) -> RetainedScope | None:
        """A scope of the same tenant with a lower priority; or, unless this tenant has its even share of the budget,
        the `room` there is included, one of the tenant that has most."""
        blocks = {key: self._list_of(other).length for key, other in self._scopes.items()}
        held = Counter[str]()
        for (tenant, _), count in blocks.items():
            held[tenant] += count
        mine = scope.key[0]
        full = [other for key, other in self._scopes.items() if blocks[key] and other is not scope]
        lower = [other for other in full if other.key[0] == mine and other.priority < scope.priority]
        if not lower:
            [(greedy, most)] = held.most_common(1)
            share = self._lists.most // len({mine, *(tenant for tenant, count in held.items() if count)})
            if greedy == mine or most <= share or held[mine] + room >= share:
                return None
            lower = [other for other in full if other.key[0] == greedy]
        return min(lower, key=lambda other: (other.priority, other.used))

    def _list_of(self, scope: RetainedScope) -> RetainedList:
        """Its list, which is another, empty one if the pool needed the blocks of it."""
        return self._lists.lists.get(scope.number) or RetainedList(-1)

    def release(self, tenant: str, name: str) -> bool:
        """End a scope, whose blocks are not wanted any more: they make room first. False: there is none."""
        scope = self._scopes.get((tenant, name))
        if scope is None or name == _COMMON:
            return False
        self._end(scope, wanted=False)
        return True

    def expire(self) -> None:
        """End the scopes whose time is over."""
        if not self._due:
            return
        now = self.clock()
        while self._due and self._due[0][0] <= now:
            due, key = heappop(self._due)
            scope = self._scopes.get(key)
            if scope is None or scope.due != due:
                continue
            if scope.expires <= now:
                self._end(scope)
            else:
                scope.due = scope.expires
                heappush(self._due, (scope.due, key))

    def _end(self, scope: RetainedScope, wanted: bool = True) -> None:
        """Let the blocks and snapshots of a scope be as all others; unless they are still `wanted`, the next to make
        room."""
        del self._scopes[scope.key]
        if scope.number in self._lists.lists:
            self._lists.dissolve(scope.number, first=not wanted)
        for digest in scope.states:
            if self._states is not None:
                self._states.let_go(digest, wanted)

    def check_integrity(self) -> None:
        """Raises `AssertionError` where a list has no record, or a record is never looked at again."""
        numbers = [scope.number for scope in self._scopes.values()]
        assert self._lists.lists.keys() <= {*numbers}, "a list has no scope"
        assert len({*numbers}) == len(numbers), "two scopes share a list"
        assert {(scope.due, scope.key) for scope in self._scopes.values()} <= {*self._due}, "a scope never expires"
        if self._states is not None:
            retained = Counter(digest for scope in self._scopes.values() for digest in scope.states)
            assert self._states.retainers == retained, "a snapshot is retained for nobody"
