"""What Triton fills into a config, and the rules it has to keep."""

from pathlib import Path

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.model import RawConfig
from charonia.repository.builder import ModelBuilder
from charonia.repository.config_defaults import enable_default_batching, fill_defaults
from charonia.repository.config_io import parse_config_text
from charonia.repository.config_validation import ignored_fields, validate_config
from charonia.repository.model_source import read_model

GOOD = """
name: "m" backend: "onnxruntime" max_batch_size: 8
input { name: "A" data_type: TYPE_FP32 dims: [ 2, -1 ] reshape { shape: [ 1, 2, -1 ] } }
output { name: "B" data_type: TYPE_FP32 dims: 1 reshape { } }
"""
OPENAI = GOOD.replace("{", "{{").replace("}", "}}") + 'parameters {{ key: "openai" value: {{ string_value: "{}" }} }}'
WHOLE = """
name: "w" platform: "ensemble" ensemble_scheduling { step { } }
input { name: "A" data_type: TYPE_FP32 dims: 1 }
"""
LONE = 'name: "m" backend: "x" '


def config_of(text: str, gpus: tuple[int, ...] = ()) -> RawConfig:
    return fill_defaults(parse_config_text(text), gpus)


def test_what_is_filled_in() -> None:
    config = config_of(GOOD + "dynamic_batching {}")
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert config["dynamic_batching"]["preferred_batch_size"] == [8]
    assert config["optimization"]["input_pinned_memory"] == {"enable": True}
    assert config["optimization"]["output_pinned_memory"] == {"enable": True}
    [group] = config["instance_group"]
    assert (group["name"], group["kind"], group["count"]) == ("m", "KIND_CPU", 2)
    validate_config(config, ())


@pytest.mark.parametrize(
    ("group", "gpus", "uses", "kind", "of"),
    [
        ("", (0, 1), True, "KIND_GPU", [0, 1]),
        ("", (0, 1), False, "KIND_CPU", []),
        ("", (), True, "KIND_CPU", []),
        ("gpus: 1", (0, 1), True, "KIND_GPU", [1]),
        ("gpus: 7", (0, 1), True, "KIND_CPU", [7]),
        ("kind: KIND_MODEL", (0, 1), True, "KIND_MODEL", []),
        ("kind: KIND_CPU", (0, 1), True, "KIND_CPU", []),
        ("kind: KIND_GPU", (0, 1), False, "KIND_GPU", [0, 1]),
    ],
)
def test_an_instance_goes_where_its_kind_says(
    group: str, gpus: tuple[int, ...], uses: bool, kind: str, of: list[int]
) -> None:
    config = fill_defaults(parse_config_text(f"{LONE} instance_group {{ {group} }}"), gpus, uses)
    [made] = config["instance_group"]
    assert (made["kind"], made["gpus"]) == (kind, of)


def test_what_was_written_stays() -> None:
    text = """
    version_policy { all {} } dynamic_batching { preferred_batch_size: 3 }
    optimization { input_pinned_memory { enable: true } }
    instance_group [ { count: 3 kind: KIND_CPU }, { name: "own" kind: KIND_MODEL } ]
    instance_group [ { gpus: [ 1 ] }, { kind: KIND_GPU } ]
    """
    config = config_of(GOOD.replace("onnxruntime", "pytorch") + text, gpus=(0, 1))
    assert config["version_policy"] == {"all": {}}
    assert config["dynamic_batching"]["preferred_batch_size"] == [3]
    groups = [(group["name"], group["kind"], group["count"], group["gpus"]) for group in config["instance_group"]]
    assert groups == [
        ("m_0", "KIND_CPU", 3, []),
        ("own", "KIND_MODEL", 1, []),
        ("m_2", "KIND_GPU", 1, [1]),
        ("m_3", "KIND_GPU", 1, [0, 1]),
    ]
    validate_config(config, (0, 1))


def test_batching_is_invited_where_the_server_found_the_size() -> None:
    for given, scheduler, invited in ((False, "", True), (True, "", False), (False, "sequence_batching {}", False)):
        config = enable_default_batching(parse_config_text(GOOD + scheduler), given)
        assert ("dynamic_batching" in config) is invited


def test_a_python_model_invites_batching_itself_and_completes_its_tensors(tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    lines = (
        "class TritonPythonModel:",
        "    @staticmethod",
        "    def auto_complete_config(config):",
        "        config.add_input({'name': 'X', 'data_type': 'TYPE_FP32', 'dims': [1]})",
        "        config.add_output({'name': 'Y', 'data_type': 'TYPE_FP32', 'dims': [1]})",
        "        config.set_max_batch_size(8)",
    )
    (version / "model.py").write_text("\n".join(lines))
    for written in ("", 'input [ { name: "X" } ] output [ { name: "Y" dims: [ 1 ] } ]'):
        (version.parent / "config.pbtxt").write_text(f'backend: "python" {written}')
        source = read_model(tmp_path / "m")
        whole = ModelBuilder().complete_config(source, source.versions[0])
        assert (whole["max_batch_size"], "dynamic_batching" in whole) == (8, False)
        tensors = [(tensor["data_type"], tensor["dims"]) for tensor in (*whole["input"], *whole["output"])]
        assert tensors == [("TYPE_FP32", [1])] * 2


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        (LONE + "max_batch_size: -1", "max_batch_size", "'max_batch_size' must be non-negative value for m"),
        (LONE + "input { }", "input.name", "model input must specify 'name' for m"),
        (LONE + 'input { name: "A" dims: 1 }', "input.A.data_type", "model input must specify 'data_type' for m"),
        (LONE + 'output { name: "A" data_type: TYPE_BOOL }', "output.A.dims", "model output must specify 'dims' for m"),
        (
            LONE + 'output { name: "A" data_type: TYPE_BOOL dims: 0 }',
            "output.A.dims",
            "model output dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
        ),
        (GOOD + 'input { name: "A" data_type: TYPE_FP32 dims: 1 }', "input.A", "model input 'A' is there twice"),
        (
            GOOD.replace("[ 1, 2, -1 ]", "[ 3, -1 ]"),
            "input.A.reshape",
            "model input has different size for dims and reshape for m",
        ),
        (
            GOOD.replace("[ 1, 2, -1 ]", "[ 2 ]"),
            "input.A.reshape",
            "model input has different number of variable-size dimensions for dims and reshape for m",
        ),
        (
            GOOD.replace("max_batch_size: 8", "").replace("onnxruntime", "x"),
            "output.B.reshape",
            "model output cannot have empty reshape for non-batching model as scalar tensors are not supported for m",
        ),
        (
            GOOD + "dynamic_batching { preferred_batch_size: 9 }",
            "dynamic_batching.preferred_batch_size",
            "dynamic batching preferred size must be <= max batch size for m",
        ),
        (
            GOOD + "dynamic_batching { priority_levels: 2 }",
            "dynamic_batching.default_priority_level",
            "default priority level must be in range [1, 2] for m",
        ),
        (
            GOOD + "dynamic_batching { priority_levels: 2 default_priority_level: 1 preserve_ordering: true }",
            "dynamic_batching.priority_levels",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            GOOD + "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
            "timeout_action",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
        (
            GOOD + "dynamic_batching { priority_queue_policy { key: 3 value { } } }",
            "dynamic_batching.priority_queue_policy",
            "priority queue policy must have priority level in range",
        ),
        (
            GOOD + 'batch_input { target_name: "N" source_input: "C" }',
            "batch_input.source_input",
            "batch_input of m has source input 'C', which is no input",
        ),
        (
            GOOD + "instance_group { kind: KIND_GPU }",
            "instance_group.kind",
            "instance group m_0 of model m has kind KIND_GPU but no GPUs are available",
        ),
        (
            GOOD + "instance_group { kind: KIND_CPU gpus: 0 }",
            "instance_group.gpus",
            "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
        ),
        (GOOD + "instance_group { count: -1 }", "instance_group.count", "instance group m_0 of model m must have a"),
        (
            GOOD + "version_policy { specific { versions: 0 } }",
            "version_policy.versions",
            "'versions' of the version policy must be 1 or more numbers of at least 1 for m",
        ),
        (WHOLE + "instance_group { }", "instance_group", "instance group should not be specified for ensemble 'w'"),
        (WHOLE + "optimization { }", "optimization", "optimization should not be specified for ensemble 'w'"),
        (WHOLE + "model_warmup { name: 'x' }", "model_warmup", "model_warmup can not be specified for ensemble 'w'"),
        (
            WHOLE.replace("dims: 1", "dims: 1 reshape { shape: [ 1, 1 ] }"),
            "input.A.reshape",
            "input 'A' of ensemble 'w' can not have 'reshape'",
        ),
        (
            'name: "w" platform: "ensemble"',
            "ensemble_scheduling",
            "ensemble scheduling must be set for ensemble w whose platform is ensemble",
        ),
        (OPENAI.format("talk"), "parameters.openai", "parameter 'openai' of m must be 'chat' or 'completions', got"),
        (OPENAI.format("chat"), "output", "m has the parameter 'openai', but no output 'text_output' of TYPE_STRING"),
        (
            OPENAI.format("chat") + 'output { name: "text_output" data_type: TYPE_STRING dims: 1 }',
            "input",
            "m has the parameter 'openai' of 'chat', but no input 'messages' or 'text_input' of TYPE_STRING",
        ),
        (
            OPENAI.format("completions")
            + """output { name: "text_output" data_type: TYPE_STRING dims: 1 }
            input { name: "messages" data_type: TYPE_STRING dims: 1 }""",
            "input",
            "m has the parameter 'openai' of 'completions', but no input 'text_input' of TYPE_STRING",
        ),
    ],
)
def test_rules(text: str, field: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate_config(config_of(text), ())
    assert caught.value.message.startswith(says)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "idle"),
    [
        (GOOD + "dynamic_batching {} instance_group { count: 2 passive: true }", []),
        (
            """name: "m" backend: "vllm" instance_group { count: 1 kind: KIND_MODEL }
            model_transaction_policy { decoupled: true } input { name: "text_input" data_type: TYPE_STRING dims: 1 }""",
            [],
        ),
        ('name: "m" backend: "vllm" instance_group { kind: KIND_GPU }', ["instance_group"]),
        (
            'name: "m" backend: "vllm" instance_group { count: 2 } max_batch_size: 8',
            ["max_batch_size", "instance_group"],
        ),
        ('name: "m" backend: "vllm" model_transaction_policy {}', ["model_transaction_policy"]),
        (GOOD + 'response_cache { enable: true } runtime: "x"', ["runtime", "response_cache"]),
        (GOOD + "response_cache { }", []),
        (GOOD + "optimization { priority: PRIORITY_MAX graph { level: 1 } }", ["optimization.priority"]),
        (GOOD + 'instance_group { profile: "1" }', ["instance_group.profile"]),
        (GOOD.replace("dims: 1 ", "dims: 1 is_shape_tensor: true "), ["output.B.is_shape_tensor"]),
        (
            WHOLE + "model_transaction_policy { decoupled: true } default_model_filename: 'x'",
            ["default_model_filename"],
        ),
        (GOOD + "model_transaction_policy { decoupled: true }", ["model_transaction_policy.decoupled"]),
        ('name: "m" backend: "fil" instance_group { kind: KIND_GPU }', ["instance_group.kind"]),
        ('name: "m" backend: "fil" instance_group { kind: KIND_CPU } instance_group { }', []),
        ('name: "m" backend: "repeat" model_transaction_policy { decoupled: true }', []),
        (LONE + "optimization { graph { level: 1 } }", ["optimization.graph"]),
        (
            'name: "m" backend: "python" batch_input { target_name: "N" } batch_output { target_name: "Y" }',
            ["batch_input", "batch_output"],
        ),
        ('name: "m" backend: "charonia" max_batch_size: 2 dynamic_batching {}', ["max_batch_size", "dynamic_batching"]),
    ],
)
def test_fields_without_effect(text: str, idle: list[str]) -> None:
    config = parse_config_text(text)
    assert list(ignored_fields(config, caching=False)) == idle


@pytest.mark.parametrize(
    ("kinds", "idle"), [((), ""), (("CPU",), "gpu"), (("GPU",), "cpu"), (("CPU", "GPU"), ""), (("MODEL",), "gpu")]
)
def test_an_accelerator_without_instances_has_no_effect(kinds: tuple[str, ...], idle: str) -> None:
    both = 'gpu_execution_accelerator { name: "tensorrt" } cpu_execution_accelerator { name: "openvino" }'
    text = GOOD + f"optimization {{ execution_accelerators {{ {both} }} }}"
    config = parse_config_text(text)
    made = {"instance_group": [{"kind": f"KIND_{kind}"} for kind in kinds]}
    path = f"optimization.execution_accelerators.{idle}_execution_accelerator"
    assert list(ignored_fields(config, made=[made])) == ([path] if idle else [])
