"""The plan of an ensemble: stages, and every contradiction told by name."""

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.model import ModelConfig
from charonia.ensembles.ensemble_plan import ENSEMBLE, EnsemblePlan

from .graphs import Step, ensemble, plan, spec

FIRST: Step = ("identity", {"IN": "x"}, {"OUT": "a"})


def refusal(config: ModelConfig) -> str:
    with pytest.raises(InvalidArgument) as caught:
        plan(config)
    assert caught.value.field == "ensemble_scheduling"
    return caught.value.message


def test_steps_run_after_what_they_need_in_whatever_order_they_stand() -> None:
    built = plan(ensemble(["x"], ["y"], ("identity", {"IN": "a"}, {"OUT": "y"}), FIRST))
    assert [step.number for step in built.steps] == [1, 0]
    assert [len(stage.steps) for stage in built.stages] == [2]
    assert built.stages[0].chained


def test_a_decoupled_step_opens_a_stage_and_earlier_tensors_are_held() -> None:
    steps: list[Step] = [
        FIRST,
        ("square", {"IN": "x"}, {"OUT": "s"}),
        ("add_sub", {"A": "s", "B": "a"}, {"SUM": "y"}),
    ]
    built = plan(ensemble(["x"], ["y"], *steps))
    assert [(stage.source and stage.source.model, [step.model for step in stage.steps]) for stage in built.stages] == [
        (None, ["identity"]),
        ("square", ["add_sub"]),
    ]


def test_steps_beside_each_other_are_not_chained() -> None:
    built = plan(ensemble(["x"], ["a", "b"], FIRST, ("identity", {"IN": "x"}, {"OUT": "b"})))
    assert not built.stages[0].chained


def stages(built: EnsemblePlan) -> list[tuple[int | None, list[int]]]:
    """The numbers of the steps, by stage: of its source, and of those that run in it."""
    return [
        (None if stage.source is None else stage.source.number, [step.number for step in stage.steps])
        for stage in built.stages
    ]


def test_a_plan_for_some_outputs_has_the_steps_that_they_need() -> None:
    steps: list[Step] = [
        FIRST,
        ("add_sub", {"A": "a", "B": "x"}, {"SUM": "sum", "DIFF": "d"}),
        ("identity", {"IN": "d"}, {"OUT": "b"}),
    ]
    built = plan(ensemble(["x"], ["a", "sum", "b"], *steps))
    assert stages(built.for_outputs(["a", "sum", "b"])) == stages(built) == [(None, [0, 1, 2])]
    assert stages(built.for_outputs(["b"])) == [(None, [0, 1, 2])]
    assert stages(built.for_outputs(["sum"])) == [(None, [0, 1])]
    assert stages(built.for_outputs(["a"])) == [(None, [0])]
    assert not built.for_outputs(["a"]).decoupled


def test_a_plan_without_a_decoupled_step_has_no_stage_for_it() -> None:
    steps: list[Step] = [
        ("square", {"IN": "x"}, {"OUT": "s"}),
        FIRST,
        ("identity", {"IN": "a"}, {"OUT": "b"}),
        ("identity", {"IN": "x"}, {"OUT": "c"}),
        ("identity", {"IN": "s"}, {"OUT": "y"}),
    ]
    built = plan(ensemble(["x"], ["y", "b", "c"], *steps))
    assert not built.stages[0].chained
    alone = built.for_outputs(["b"])
    assert stages(alone) == [(None, [1, 2])]
    assert alone.stages[0].chained
    assert stages(built.for_outputs(["y", "c"])) == [(None, [3]), (0, [4])]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (ensemble(["x"], ["y"]), "must specify 'step' for ensemble 'whole'"),
        (ensemble(["x"], ["y"], ("", {"IN": "x"}, {"OUT": "y"})), "must specify 'model_name' in step 0 of ensemble"),
        (ensemble(["x"], ["y"], ("identity", {}, {"OUT": "y"})), "must specify 'input_map' in step 0 of ensemble"),
        (ensemble(["x"], ["y"], ("identity", {"IN": "x"}, {})), "must specify 'output_map' in step 0 of ensemble"),
        (ensemble(["x"], ["a"], FIRST, FIRST), "ensemble tensor 'a' can appear in an output map only once"),
        (ensemble(["x", "z"], ["a"], FIRST), "ensemble input 'z' for ensemble whole is not used"),
        (ensemble(["x"], ["a", "z"], FIRST), "ensemble output 'z' for ensemble whole is not used"),
        (
            ensemble(["x"], ["a"], FIRST, ("identity", {"IN": "x"}, {"OUT": "b"})),
            "ensemble tensor 'b' is unused in ensemble 'whole'",
        ),
        (ensemble(["x"], ["a"], FIRST, ("identity", {"IN": "q"}, {"OUT": "x2"})), "'x2' is unused"),
        (
            ensemble(["x"], ["a", "b"], FIRST, ("identity", {"IN": "q"}, {"OUT": "b"})),
            "'q' is neither an input of ensemble 'whole' nor an output of one of its steps",
        ),
        (
            ensemble(["x"], ["y"], ("add_sub", {"A": "x", "B": "c"}, {"SUM": "y", "DIFF": "b"}),
                     ("identity", {"IN": "b"}, {"OUT": "c"})),
            "wait for each other's outputs: 'add_sub' (step 0), 'identity' (step 1)",
        ),
        (ensemble(["x"], ["a"], ("identity", {"NO": "x"}, {"OUT": "a"})), "model 'identity' has no input 'NO'"),
        (ensemble(["x"], ["a"], ("identity", {"IN": "x"}, {"NO": "a"})), "model 'identity' has no output 'NO'"),
        (ensemble(["x"], ["a"], ("add_sub", {"A": "x"}, {"SUM": "a"})), "input 'B' of model 'add_sub' is not mapped"),
        (
            ensemble(["x"], [spec("y", "BYTES")], FIRST, ("text", {"IN": "a"}, {"OUT": "y"})),
            "ensemble tensor 'a': inconsistent data type: TYPE_STRING is inferred from model 'text' (step 1) "
            "while TYPE_INT32 is inferred from model 'identity' (step 0)",
        ),
        (
            ensemble(["x"], [spec("y", dims=(2,))], FIRST, ("wide", {"IN": "a"}, {"OUT": "y"})),
            "ensemble tensor 'a': inconsistent shape: [2] is inferred from model 'wide' (step 1) while [1] is "
            "inferred from model 'identity' (step 0)",
        ),
        (ensemble(["x"], [spec("a", "FP32")], FIRST), "TYPE_FP32 is inferred from model 'whole' while TYPE_INT32"),
        (
            ensemble([spec("x", dims=())], [spec("y", dims=())], ("batched", {"IN": "x"}, {"OUT": "y"}), batch=8),
            "the ensemble's max_batch_size is 8, but its model 'batched' has 4",
        ),
        (
            ensemble(
                ["x", "z"],
                ["y"],
                ("square", {"IN": "x"}, {"OUT": "a"}),
                ("square", {"IN": "z"}, {"OUT": "b"}),
                ("add_sub", {"A": "a", "B": "b"}, {"SUM": "y"}),
            ),
            "in ensemble whole, step of model 'add_sub' receives inputs originated from different decoupled models: "
            "'a' from 'square' (step 0) and 'b' from 'square' (step 1)",
        ),
        (
            ensemble(["x"], ["a", "b"], ("square", {"IN": "x"}, {"OUT": "a"}), ("square", {"IN": "x"}, {"OUT": "b"})),
            "the response receives inputs originated from different decoupled models",
        ),
    ],
)  # fmt: skip
def test_refusals_name_the_tensor_and_both_ends(config: ModelConfig, text: str) -> None:
    assert text in refusal(config)


def test_batched_and_unbatched_models_mix_where_whole_shapes_agree() -> None:
    both = ("batched", {"IN": "x"}, {"OUT": "a"}), ("identity", {"IN": "a"}, {"OUT": "y"})
    built = plan(ensemble([spec("x", dims=(-1,))], ["y"], *both))
    assert [step.model for step in built.steps] == ["batched", "identity"]


def test_a_model_of_batches_of_one_fits_one_that_does_not_batch_with_and_without_the_batch_dimension() -> None:
    steps: list[Step] = [("lone", {"IN": "x"}, {"OUT": "y"})]
    assert plan(ensemble(["x"], ["y"], *steps)).batch_changes == {0: {"IN": 1}, ENSEMBLE: {"y": -1}}
    whole = ensemble([spec("x", dims=(1, 1))], [spec("y", dims=(-1, 1))], *steps)
    assert plan(whole).batch_changes == {0: {"IN": 0}, ENSEMBLE: {"y": 0}}
    assert "inconsistent shape" in refusal(ensemble([spec("x", dims=(2,))], ["y"], *steps))
    assert "inconsistent shape" in refusal(
        ensemble([spec("x", dims=())], ["y"], ("batched", {"IN": "x"}, {"OUT": "y"}))
    )
