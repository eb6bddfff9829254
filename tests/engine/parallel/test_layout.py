"""Which rank stands where."""

from charonia.engine.parallel.layout import RankLayout


def test_a_stages_ranks_are_neighbours() -> None:
    layout = RankLayout(tensor=2, pipeline=3)
    assert layout.world == 6
    assert [list(stage) for stage in layout.stages()] == [[0, 1], [2, 3], [4, 5]]
    assert [layout.stage_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


def test_the_first_of_the_last_stage_reports() -> None:
    assert RankLayout(2, 3).result_rank == 4
    assert RankLayout(4, 1).result_rank == 0
    assert RankLayout(1, 3).result_rank == 2


def test_names_say_where_a_rank_stands() -> None:
    assert RankLayout(2, 2).rank_name(3) == "rank 3 of 4 (stage 1, tensor 1)"
    assert RankLayout(2, 1).rank_name(1) == "rank 1 of 2"
    assert str(RankLayout(2, 2)) == "4 ranks (tensor 2, pipeline 2)"
