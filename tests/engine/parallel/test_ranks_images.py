"""Images of several ranks: what has landed on all of them has landed."""

from charonia.core.metrics import ImageTotals
from charonia.engine.parallel.rank_messages import FetchImages, ImagesCounted, ImagesMoved, RankCommand, StoreImages
from charonia.engine.parallel.ranks_images import RanksImages
from charonia.kvcache.tiers.landed_images import ImagePlace

IMAGES = [ImagePlace(bytes([number]) * 32, number) for number in range(3)]


def test_an_image_has_landed_where_every_rank_has_it() -> None:
    commands: list[RankCommand] = []
    ranks = RanksImages(2, commands.append)
    first, second = ranks.fetch(IMAGES), ranks.fetch(IMAGES[:1])
    assert commands == [FetchImages(0, IMAGES), FetchImages(1, IMAGES[:1])]
    ranks.add_report(1, ImagesMoved(1, [True]))
    ranks.add_report(1, ImagesMoved(0, [True, False, True]))
    assert not first.done()
    ranks.add_report(0, ImagesMoved(0, [True, True, False]))
    assert first.result() == [True, False, False]
    assert not second.done()
    ranks.add_report(0, ImagesMoved(1, [True]))
    assert second.result() == [True]


def test_an_image_is_written_where_every_rank_wrote_it() -> None:
    commands: list[RankCommand] = []
    ranks = RanksImages(2, commands.append)
    stored = ranks.store(IMAGES)
    assert commands == [StoreImages(0, IMAGES)]
    ranks.add_report(0, ImagesMoved(0, [True, False, True]))
    ranks.add_report(1, ImagesMoved(0, [True, True, False]))
    assert stored.result() == [True, False, False]


def test_counts_are_those_that_each_rank_told_last() -> None:
    ranks = RanksImages(2, lambda command: None)
    for rank, read in ((0, 3), (1, 4), (0, 5)):
        ranks.add_report(rank, ImagesCounted(ImageTotals(read=read, read_seconds=0.5)))
    assert (ranks.totals.read, ranks.totals.read_seconds) == (9, 1.0)


def test_no_fetch_waits_for_a_lost_rank() -> None:
    ranks = RanksImages(2, lambda command: None)
    before = ranks.fetch(IMAGES)
    ranks.forget()
    assert before.cancelled()
    assert ranks.fetch(IMAGES).cancelled()


def test_a_report_that_comes_after_a_rank_was_lost_is_nothing() -> None:
    """A rank that is still there had moved its share, and its report was on its way."""
    ranks = RanksImages(2, lambda command: None)
    move = ranks.fetch(IMAGES)
    ranks.forget()
    ranks.add_report(1, ImagesMoved(0, [True, True, True]))
    ranks.add_report(1, ImagesCounted(ImageTotals(read=3)))
    assert move.cancelled()
    assert ranks.totals.read == 3
