"""`charonia check`: the real backends' configs, read, completed and built, and nothing loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charonia.cli.app import app
from charonia.cli.options import ConfigOptions
from charonia.cli.repository_check import print_check_report
from charonia.core.errors import InvalidArgument

DEMO = Path(__file__).parents[2] / "examples/model_repository/demo/1"

GOOD = """
backend: "identity"
input { name: "A" data_type: TYPE_FP32 dims: 16 }
output { name: "B" data_type: TYPE_FP32 dims: 16 }
"""


def write(root: Path, name: str, config: str, version: str = "1") -> None:
    (root / name / version).mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)


def test_a_good_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", GOOD + 'host_policy: "x"'.replace("host_policy", "runtime"))
    assert print_check_report([str(tmp_path)], ConfigOptions()) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"a: {tmp_path}/a/config.pbtxt:5: runtime has no effect here",
        "a: good: identity, version 1",
    ]


def test_several_repositories_are_checked_as_one_server_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "one", "a", GOOD)
    write(tmp_path / "one", "b", GOOD)
    write(tmp_path / "two", "b", GOOD)
    assert app(["check", str(tmp_path / "one"), "--model-repository", str(tmp_path / "two")]) == 1
    good, twice = capsys.readouterr().out.splitlines()
    assert good == "a: good: identity, version 1"
    assert twice.startswith("b: WRONG: model 'b' is not unique across all model repositories")
    assert app(["check"]) == 1
    assert "nothing to check: name a model repository" in capsys.readouterr().err


def test_a_link_that_leads_nowhere_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gone").symlink_to("elsewhere")
    assert print_check_report([str(tmp_path)], ConfigOptions()) == 1
    told = f"gone: WRONG: {tmp_path}/gone is a link to '{tmp_path}/elsewhere', which is not there"
    assert capsys.readouterr().out.splitlines() == [told]


def test_routes_are_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", GOOD)
    for routes, status, says in (
        (
            "{r: {arms: [{model: a, weight: 1}], sticky: {field: user}}}",
            0,
            "route 'r' is good: a 1; sticky by field user",
        ),
        ("{r: {arms: [{model: b, weight: 1}]}}", 1, "WRONG: route 'r': no model repository has a model 'b'"),
    ):
        (tmp_path / "routes.yaml").write_text(f"routes: {routes}")
        assert print_check_report([str(tmp_path)], ConfigOptions()) == status
        assert capsys.readouterr().out.splitlines() == ["a: good: identity, version 1", f"routes.yaml: {says}"]


def test_an_ensemble_and_a_python_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = '{ model_name: "b" model_version: -1 input_map { key: "A" value: "A" } output_map { key: "B" value: "%s" } }'
    tensors = GOOD.replace('backend: "identity"', "")
    write(tmp_path, "a", f'platform: "ensemble" {tensors} ensemble_scheduling {{ step [ {step % "B"} ] }}')
    write(tmp_path, "b", GOOD.replace("identity", "python"))
    (tmp_path / "b" / "1" / "model.py").write_text("class TritonPythonModel: pass")
    write(tmp_path, "c", f'platform: "ensemble" {tensors} ensemble_scheduling {{ step [ {step % "C"} ] }}')
    assert print_check_report([str(tmp_path)], ConfigOptions()) == 1
    good, python, wrong = capsys.readouterr().out.splitlines()
    assert (good, python) == ("a: good: ensemble, version 1", "b: good: python, version 1")
    assert "ensemble output 'B' for ensemble c is not used" in wrong


def test_pipelines_are_read_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, code in (
        ("a", "async def run(request, lookup): yield\nraise SystemExit"),
        ("b", "\n1 +"),
        ("c", "x = 1"),
    ):
        write(tmp_path, name, GOOD.replace("identity", "pipeline"))
        (tmp_path / name / "1" / "pipeline.py").write_text(code)
    assert print_check_report([str(tmp_path)], ConfigOptions()) == 1
    good, broken, without = capsys.readouterr().out.splitlines()
    assert good == "a: good: pipeline, version 1"
    assert broken == f"b: WRONG: {tmp_path}/b/1/pipeline.py:2: invalid syntax"
    assert without.startswith(f"c: WRONG: {tmp_path}/c/1/pipeline.py defines no 'run'")


def test_numbers_cost_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of these was counted to, or given memory."""
    levels = f"dynamic_batching {{ priority_levels: {2**64 - 1} default_priority_level: {2**63} }}"
    warm_up = f'model_warmup {{ name: "w" count: {2**32 - 1} inputs {{ key: "A" value {{ '
    write(tmp_path, "a", f"{GOOD} max_batch_size: {2**31 - 1} {levels}")
    write(tmp_path, "b", f"{GOOD} {warm_up} data_type: TYPE_FP32 dims: 16 zero_data: true }} }} }}")
    write(tmp_path, "c", f"{GOOD} {warm_up} data_type: TYPE_FP32 dims: {2**40} random_data: true }} }} }}")
    print_check_report([str(tmp_path)], ConfigOptions())
    good, other, refused = capsys.readouterr().out.splitlines()
    assert (good, other) == ("a: good: identity, version 1", "b: good: identity, version 1")
    assert refused.endswith(f"must have at most 64 dimensions and 2147483647 bytes, got shape [{2**40}]")


LLM = 'backend: "charonia" parameters { key: "max_num_seqs" value { string_value: "3" } }'


def write_llm(making: Any, root: Path, name: str = "llama", model: str = "llm") -> Path:
    """A language model in the repository; the folder of its version."""
    write(root, model, LLM)
    return Path(making.write_checkpoint(root / model / "1", making.CONFIGS[name]))


def test_good_language_models(making: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_llm(making, tmp_path, model="ours")
    write_llm(making, tmp_path, "granite", "theirs")
    write(tmp_path, "hub", LLM + 'parameters { key: "model" value { string_value: "nobody/nothing" } }')
    assert print_check_report([str(tmp_path)], ConfigOptions()) == 0
    assert capsys.readouterr().out.splitlines() == [
        "hub: good: charonia, version 1; nobody/nothing is not here yet",
        "ours: good: charonia, version 1",
        "theirs: good: charonia, version 1; transformers computes GraniteForCausalLM, which is tried out when it loads",
    ]


def test_adapters_are_read_too(
    making: Any, sibling: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version, adapters = write_llm(making, tmp_path / "models"), sibling("adapters.py")
    good = adapters.write_adapter(tmp_path / "good", adapters.layers_of(version, ("q_proj",)))
    wrong = adapters.write_adapter(tmp_path / "wrong", adapters.layers_of(version, ("q_proj",)), use_dora=True)
    for modules, says in (
        ({"a": str(good)}, "good: charonia, version 1"),
        ({"a": str(good), "b": "owner/name"}, "good: charonia, version 1; adapter owner/name is not here yet"),
        ({"a": str(good), "b": str(wrong)}, "use_dora: DoRA is not supported"),
        ({"a": str(tmp_path / "none")}, "there is no directory"),
    ):
        text = json.dumps(modules).replace('"', r"\"")
        settings = {"enable_lora": "true", "lora_modules": text}
        lines = [
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in settings.items()
        ]
        (version.parent / "config.pbtxt").write_text("\n".join((LLM, *lines)))
        assert print_check_report([str(tmp_path / "models")], ConfigOptions()) == ("good" not in says)
        assert says in capsys.readouterr().out


def edit_config(version: Path, **changes: object) -> None:
    path = version / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda version: (version / "config.json").unlink(), "config.json: missing"),
        (
            lambda version: edit_config(version, intermediate_size=97),
            "has shape [96, 64], but config.json means [97, 64]",
        ),
        (lambda version: edit_config(version, num_hidden_layers=3), "model.layers.2.input_layernorm.weight is missing"),
        (
            lambda version: edit_config(version, architectures=["UMT5ForConditionalGeneration"]),
            "UMT5ForConditionalGeneration",
        ),
        (lambda version: (version / "model.safetensors").write_bytes(b"cut"), "truncated"),
        (lambda version: (version / "tokenizer.json").unlink(), "no tokenizer.json"),
        (
            lambda version: (version.parent / "config.pbtxt").write_text(
                LLM.replace("max_num_seqs", "max_model_len", 1).replace('"3"', '"300"')
            ),
            "max_model_len must be between 1 and the checkpoint's 256",
        ),
        (
            lambda version: (version.parent / "config.pbtxt").write_text(
                LLM.replace("max_num_seqs", "tensor_parallel_size")
            ),
            "4 attention heads can't be shared evenly by 3 ranks",
        ),
    ],
)
def test_a_language_model_that_would_not_load(
    making: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], object], says: str
) -> None:
    """Found by what loads it, without a weight being read."""
    spoil(write_llm(making, tmp_path))
    assert print_check_report([str(tmp_path)], ConfigOptions()) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("llm: WRONG: ")
    assert says in line


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("nonsense", "failed to read text proto from {file}:1:1 : "),
        (GOOD.replace("FP32", "FP33", 1), "failed to read text proto from {file}:3:"),
        (GOOD.replace("dims: 16", "dims: -2", 1), "{file}:3: model input dimension must be integer >= 1"),
        (GOOD + "instance_group { passive: true }", "{file}:5: model 'm' has no instance that takes requests"),
        (GOOD + 'batch_input { target_name: "L" source_input: "X" }', "{file}:5: batch_input of m has source input"),
        (GOOD + 'default_model_filename: "../2/model.onnx"', "{file}:5: 'default_model_filename' of m must stay"),
        (GOOD + 'default_model_filename: "/etc/passwd"', "{file}:5: 'default_model_filename' of m must stay within"),
        (
            GOOD + 'metric_tags { key: "b-c" value: "1" }',
            "{file}:5: 'metric_tags' of m must be named by letters, digits",
        ),
        (GOOD + "instance_group { count: 2000000000 }", "{file}:5: model m has 2000000000 instances, and may"),
        (
            'backend: "charonia"\nparameters { key: "bogus" value { string_value: "3" } }',
            "{file}:2: unknown parameter 'bogus'",
        ),
    ],
)
def test_what_would_not_load(tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, says: str) -> None:
    write(tmp_path, "m", config)
    assert print_check_report([str(tmp_path)], ConfigOptions()) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("m: WRONG: " + says.format(file=tmp_path / "m" / "config.pbtxt"))


def test_a_model_that_cannot_be_read_leaves_the_others_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "fine", GOOD)
    for name, output in (("loop", "loop"), ("nul", r"\000")):
        write(tmp_path, name, GOOD.replace('name: "B"', f'name: "B" label_filename: "{output}"'))
    (tmp_path / "loop" / "loop").symlink_to("loop")
    assert print_check_report([str(tmp_path)], ConfigOptions()) == 1
    fine, *wrong = capsys.readouterr().out.splitlines()
    assert fine == "fine: good: identity, version 1"
    assert [line.partition(": WRONG: ")[0] for line in wrong] == ["loop", "nul"]


def test_what_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no folders"):
        print_check_report([str(tmp_path)], ConfigOptions())
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(InvalidArgument, match="is an encoder and no model repository: charonia import"):
        print_check_report([str(tmp_path)], ConfigOptions())
    with pytest.raises(InvalidArgument, match="cannot read model repository '/xxx"):
        print_check_report(["/" + "x" * 300], ConfigOptions())


def test_of_a_checkpoint_it_says_what_serving_it_is_like(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_check_report([str(DEMO)], ConfigOptions()) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM, 4 layers" in said
    assert "all matrices are stored as bfloat16" in said
    stored = sum(file.stat().st_size for file in DEMO.glob("*.safetensors"))
    assert f"memory: {stored / 1e6:.0f} MB of weights" in said  # a table that is also the head counts once
    (tmp_path / "config.json").write_text("{}")
    assert print_check_report([str(tmp_path)], ConfigOptions()) == 1
    assert "WRONG" in capsys.readouterr().out


def test_options_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is not a directory"):
        print_check_report([str(tmp_path / "no")], ConfigOptions())
    for flag in ("onnxruntime", "a,b", "default-max-batch-size=many"):
        with pytest.raises(InvalidArgument, match="--backend-config"):
            print_check_report([str(tmp_path)], ConfigOptions(backend_config=(flag,)))
