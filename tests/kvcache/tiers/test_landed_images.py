"""Images on their way and landed, in any order of events: none is lost, none is held for nobody."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from charonia.kvcache.tiers.landed_images import LandedImages

SIZE = 4
KEYS = st.sampled_from([bytes([number]) * 32 for number in range(6)])


class LandedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.images = LandedImages(SIZE)
        self.holds: list[tuple[bytes, int]] = []
        self.on_their_way: list[tuple[bytes, int]] = []
        self.in_memory = set[int]()
        """Numbers under which a rank has something."""

    @rule(key=KEYS)
    def hold(self, key: bytes) -> None:
        if not self.images.is_expected(key):
            if not self.images.room:
                return
            self.on_their_way.append((key, self.images.expect(key)))
        self.holds.append((key, self.images.hold(key)))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.images.release(*hold)

    @precondition(lambda self: self.on_their_way)
    @rule(data=st.data(), arrives=st.booleans())
    def come(self, data: st.DataObject, arrives: bool) -> None:
        key, number = self.on_their_way.pop(data.draw(st.integers(0, len(self.on_their_way) - 1)))
        if arrives:
            self.in_memory.add(number)
            self.images.arrive(key, number)
        else:
            self.images.fail(key, number)

    @rule(key=KEYS)
    def restore(self, key: bytes) -> None:
        if key in self.images:
            self.in_memory.remove(self.images.restore(key))

    @rule()
    def drop(self) -> None:
        self.in_memory -= {*self.images.take_dropped()}

    @invariant()
    def nothing_leaks(self) -> None:
        self.images.check_integrity(self.holds)

    def teardown(self) -> None:
        for hold in self.holds:
            self.images.release(*hold)
        for key, number in self.on_their_way:
            self.in_memory.add(number)
            self.images.arrive(key, number)
        self.drop()
        assert self.in_memory == set()
        assert self.images.room == SIZE
        assert not self.images


TestLandedImages = LandedMachine.TestCase
TestLandedImages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
