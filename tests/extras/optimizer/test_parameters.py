"""Parameters: how they are read, what they do to configs, and which configurations a load cannot tell apart."""

from collections.abc import Callable
from pathlib import Path

import pytest

from charonia.core.errors import CharoniaError, InvalidArgument, NotFound, Unsupported
from charonia.extras.optimizer.parameters import (
    ClosedLoop,
    configured,
    default_parameters,
    engine_flags,
    equivalence,
    parse_sweeps,
)
from charonia.extras.optimizer.search_space import SearchSpace
from charonia.extras.optimizer.tuned_models import TunedModels, open_models
from charonia.processes.host import usable_cores
from charonia.repository.model_source import parameters_of
from charonia.scheduler.config import SchedulerConfig

Opened = Callable[[str], TunedModels]


def test_values_have_an_order_where_they_are_numbers(opened: Opened) -> None:
    sweeps = ["instances=4,1,2", "max_queue_delay_microseconds=1000,off,0", "execution_mode=0,1"]
    instances, delay, mode = parse_sweeps(sweeps, opened("onnx"))
    assert (instances.values, instances.now, instances.ordered) == ((1, 2, 4), 0, True)
    assert instances.monotone_metrics == ("memory",)
    assert (delay.values, delay.now, delay.ordered) == (("off", 0, 1000), 0, True)
    assert mode.values == (0, 1)
    [precision] = parse_sweeps(["quantization=none,int8"], opened("llm"))
    assert (precision.values, precision.ordered) == (("none", "int8"), False)


def test_what_holds_now_or_is_nearest_is_known(opened: Opened) -> None:
    [sequences] = parse_sweeps(["max_num_seqs=4,12,64"], opened("llm"))
    assert sequences.values[sequences.now] == 12
    [batch] = parse_sweeps(["max_batch_size=1,8,32"], opened("onnx"))
    assert batch.values[batch.now] == 8
    cores = usable_cores().threads
    [threads] = parse_sweeps([f"intra_op_thread_count={cores + 7},{cores},{cores + 9}"], opened("onnx"))
    assert threads.values[threads.now] == cores, "where the config says nothing, the backend takes every core"
    default = SchedulerConfig().max_num_batched_tokens
    [tokens] = parse_sweeps([f"max_num_batched_tokens=1,{default},{2 * default}"], opened("llm"))
    assert tokens.values[tokens.now] == default


@pytest.mark.parametrize(
    ("model", "sweep", "message"),
    [
        ("onnx", "instances", "'instances' is not of the form KNOB=VALUE,VALUE"),
        ("onnx", "instances=", "'instances=' is not of the form"),
        ("onnx", "instances=1,1", "has a value twice"),
        ("onnx", "instances=0", "'instances' must be a whole number of at least 1, got '0'"),
        ("onnx", "instances=off", "'instances' must be a whole number of at least 1, got 'off'"),
        ("onnx", "max_queue_delay_microseconds=-1", "of at least 0, or 'off', got '-1'"),
        ("onnx", "instance=1", "model 'onnx' has no knob 'instance'; known are instances, .* did you mean 'instances'"),
        ("llm", "max_num_sequences=1", "model 'llm' has no knob 'max_num_sequences'.* did you mean 'max_num_seqs'"),
        ("llm", "max_num_seqs=0", "parameter 'max_num_seqs' must be an integer >= 1, got 0"),
        ("llm", "quantization=int3", "parameter 'quantization' must be one of none, int8, int4"),
        ("llm", "speculation=guess:4", "method must be one of ngram"),
        ("llm", "speculation=ngram:many", "'speculation' must be 'off' or METHOD:TOKENS"),
        ("graph", "instances=1,2", "'instances' names no model: write MODEL.KNOB, with MODEL one of llm, onnx"),
        ("graph", "graph.instances=1,2", "'graph' only asks other models"),
        ("graph", "onnx.max_num_seqs=1", "model 'onnx' has no knob 'max_num_seqs'"),
    ],
)
def test_a_wrong_sweep_is_refused(model: str, sweep: str, message: str, opened: Opened) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse_sweeps([sweep], opened(model))


def test_a_knob_may_be_there_once(opened: Opened) -> None:
    with pytest.raises(InvalidArgument, match="'instances' is there twice"):
        parse_sweeps(["instances=1,2", "instances=4"], opened("onnx"))


def test_settings_become_a_config(opened: Opened) -> None:
    settings = {
        "instances": 2,
        "max_batch_size": 4,
        "max_queue_delay_microseconds": 500,
        "preferred_batch_size": 8,
        "intra_op_thread_count": 1,
        "parameters.mine": "x",
    }
    config = configured(opened("onnx"), settings)["onnx"]
    assert config["instance_group"][0]["count"] == 2
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 500
    assert config["dynamic_batching"]["preferred_batch_size"] == [], "8 is more than the largest batch"
    assert parameters_of(config) == {
        "intra_op_thread_count": "1",
        "mine": "x",
    }
    assert "dynamic_batching" not in configured(opened("onnx"), {"max_queue_delay_microseconds": "off"})["onnx"]
    both = {"max_queue_delay_microseconds": "off", "preferred_batch_size": 8}
    assert "dynamic_batching" not in configured(opened("onnx"), both)["onnx"]
    assert opened("onnx").loaded.config["max_batch_size"] == 8, "the config as it was written stays"


def test_the_knobs_of_a_graph_are_those_of_its_steps(opened: Opened) -> None:
    configs = configured(
        opened("graph"), {"onnx.instances": 2, "llm.speculation": "ngram:3", "llm.max_num_seqs": "off"}
    )
    assert configs["onnx"]["instance_group"][0]["count"] == 2
    assert parameters_of(configs["llm"]) == {"speculative_config": '{"method":"ngram","num_speculative_tokens":3}'}


def test_settings_of_a_checkpoint_become_flags() -> None:
    settings = {"max_num_seqs": 8, "prefix_caching": "false", "enforce_eager": "true", "speculation": "ngram:4"}
    assert engine_flags({**settings, "quantization": "off"}) == (
        "--max-num-seqs=8 --no-prefix-caching --enforce-eager "
        """'--speculative-config={"method":"ngram","num_speculative_tokens":4}'"""
    )


def test_without_a_sweep_only_what_changes_no_answer_is_turned(opened: Opened) -> None:
    parameters = {
        parameter.name: parameter.values for parameter in default_parameters(opened("llm"), ClosedLoop(16), threads=4)
    }
    assert parameters == {"max_num_seqs": (4, 8, 16), "max_num_batched_tokens": (256, 512, 1024, 2048)}
    parameters = {
        parameter.name: parameter.values for parameter in default_parameters(opened("onnx"), ClosedLoop(16), threads=4)
    }
    assert parameters["instances"] == parameters["intra_op_thread_count"] == (1, 2, 4)
    assert 8 in parameters["max_batch_size"], "what holds now is among what is tried"
    assert max(parameters["max_batch_size"]) == 16
    steps = {
        parameter.name: parameter.values for parameter in default_parameters(opened("graph"), ClosedLoop(16), threads=4)
    }
    assert min(steps["onnx.max_batch_size"]) == 8, "a step takes what the ensemble gives it"
    assert "llm.max_num_seqs" in steps


def space(models: TunedModels, loop: ClosedLoop, *sweeps: str) -> SearchSpace:
    parameters = parse_sweeps(sweeps, models)
    return SearchSpace(parameters, equivalence(parameters, models, loop))


def test_what_a_load_cannot_tell_apart_is_one(opened: Opened) -> None:
    assert space(opened("llm"), ClosedLoop(6), "max_num_seqs=2,4,8,16,32").configurations == [(8,), (2,), (4,)]
    assert space(opened("llm"), ClosedLoop(None), "max_num_seqs=2,4,8,16,32").size == 5
    sweeps = ("max_batch_size=1,4,16,64", "max_queue_delay_microseconds=off,0,1000")
    # Without a batcher, or without room for a batch, nothing differs; above four requests no batch is larger.
    assert set(space(opened("onnx"), ClosedLoop(4), *sweeps).configurations) == {
        (1, "off"),
        (4, 0),
        (4, 1000),
    }
    assert space(opened("onnx"), ClosedLoop(4, batch=16), *sweeps).size > 3


def test_a_space_of_a_graph_keeps_all_combinations(opened: Opened) -> None:
    assert space(opened("graph"), ClosedLoop(2), "onnx.max_batch_size=8,16", "llm.max_num_seqs=8,16").size == 4


def test_what_cannot_be_analyzed_says_why(repository: Path, tmp_path: Path) -> None:
    def refuse(source: Path, model: str, kind: type[CharoniaError], message: str) -> None:
        with pytest.raises(kind, match=message), open_models(str(source), model):
            pass

    (repository / "onnx" / "config.pbtxt").write_text('backend: "onnxruntime"\nsequence_batching { }')
    refuse(repository, "onnx", Unsupported, "model 'onnx' is stateful")
    refuse(repository, "", InvalidArgument, "has several models: name one with --model, of graph, llm, onnx")
    refuse(repository, "none", NotFound, "there is no model 'none'")
    refuse(tmp_path / "away", "", InvalidArgument, "there is no directory")
    (repository / "llm" / "config.pbtxt").write_text('backend: "vllm"')
    refuse(repository, "llm", Unsupported, "backend vllm, whose settings are not those of a config")


def test_another_file_makes_another_digest(repository: Path) -> None:
    def digest() -> str:
        with open_models(str(repository), "onnx") as models:
            return models.digest()

    before = digest()
    assert digest() == before
    (repository / "onnx" / "1" / "model.onnx").write_bytes(b"other")
    assert digest() != before
