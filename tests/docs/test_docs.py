"""The pages say what there is: every flag, metric, route, field and command, and nothing else."""

import importlib
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from cyclopts.exceptions import CycloptsError
from google.protobuf import text_format
from prometheus_client import CollectorRegistry
from tritonclient.grpc import model_config_pb2

from charonia.api.anthropic import messages_request
from charonia.api.app import build_app
from charonia.api.extensions import RouteExtensions
from charonia.api.metadata import ServerInfo
from charonia.api.openai import chat_messages, json_body, responses_request, schemas
from charonia.api.prometheus import MetricRegistries
from charonia.cli.app import app
from charonia.cli.extensions import plan_extensions
from charonia.cli.options import ServeOptions
from charonia.cli.plan import endpoint_settings, server_facts
from charonia.core.foreign_parameters import FOREIGN_PARAMETERS
from charonia.core.sampling import SamplingParams
from charonia.engine.attention.selector import BACKENDS
from charonia.engine.client import infer, request_parameters
from charonia.engine.cpu import library
from charonia.engine.options import EngineOptions, parse_settings
from charonia.engine.vllm.arguments import OWN_NAMES

from .flag_tables import option_rows, renewed

PAGES = (
    "README.md",
    "operating.md",
    "flags.md",
    "serving-models.md",
    "models.md",
    "architectures.md",
    "routes.md",
    "rollouts.md",
    "sizing.md",
    "security.md",
    "logs-and-traces.md",
    "console.md",
    "deploying.md",
    "fleet.md",
    "analyze.md",
    "tensorrt-llm.md",
    "metrics.md",
    "explain.md",
    "batches.md",
    "clients.md",
    "in-process.md",
    "responses.md",
    "structured-outputs.md",
    "speculation.md",
    "messages.md",
    "adapters.md",
    "checkpoints.md",
    "pipelines.md",
    "repositories.md",
    "tools-and-reasoning.md",
    "architecture.md",
    "inside.md",
    "images.md",
    "speech.md",
    "life-of-a-request.md",
    "performance.md",
    "benchmarks.md",
    "capacity.md",
    "extending.md",
)
MAPS = ("architecture.md", "inside.md", "life-of-a-request.md")
"""Which files there are, and what they do."""
OTHERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
MANNERS = ("streaming", "exclude_input_from_output")
"""Other names of what does not choose tokens."""
LOGPROBS = ("logprobs", "prompt_logprobs")
"""v2 asks for them otherwise, or not at all."""


def test_every_page_is_in_the_index(root: Path, page: Any) -> None:
    assert {path.name for path in (root / "docs").glob("*.md")} == set(PAGES)
    assert [name for name in PAGES[1:] if f"]({name})" not in page("README.md").text] == []


def test_no_page_has_marks_of_a_conflict(page: Any) -> None:
    pages = *map(page, PAGES), *(page(f"../{name}") for name in OTHERS)
    assert [each.path.name for each in pages if re.search(r"(?m)^(<<<<<<<|>>>>>>>) ", each.text)] == []


def test_links_lead_somewhere(root: Path, page: Any) -> None:
    broken = [
        f"{each.path.name}: {link}"
        for each in (*map(page, PAGES), *(page(f"../{name}") for name in OTHERS))
        for link in re.findall(r"\]\(([^)\s]+)\)", each.prose)
        if not link.startswith(("http://", "https://")) and not leads_somewhere(each, link, page)
    ]
    assert broken == []


def leads_somewhere(source: Any, link: str, page: Callable[[str], Any]) -> bool:
    name, _, anchor = link.partition("#")
    target = source.path.parent / name if name else source.path
    return target.exists() and (not anchor or anchor in page(str(target.resolve())).headings())


@pytest.mark.parametrize("name", [*MAPS, "../CONTRIBUTING.md"])
def test_files_that_are_named_exist(root: Path, page: Any, name: str) -> None:
    """A name without a folder is that of some file: a row's other names say where."""
    folders = [package.parent for package in root.glob("*/__init__.py")]
    there = {path.name for folder in folders for path in folder.rglob("*.*")}
    named = set(re.findall(r"`([\w/]+\.(?:py|pyi|c|h|inc|js))`", page(name).text))
    assert len(named) > 5
    assert [file for file in named if not ((root / file).is_file() if "/" in file else file in there)] == []


FILE_OR_FOLDER = re.compile(r"`((?:[\w-]+/)+|[\w/-]+\.(?:py|pyi|c|h|inc|js))`")
NAME_IN_FILE = re.compile(r"`(\w+)(?:\(\))?` (?:in |of |\()`([\w/]+/\w+\.(?:py|c|h|js))`")


def test_names_of_files_stand_beside_the_one_before(root: Path, page: Any) -> None:
    """In the rows of what a change touches, a file without a folder is in that of the one before it."""
    rows = page("architecture.md").text.partition("## Where to look")[2]
    lost, rows_read = [], 0
    for row in rows.splitlines():
        folder, names = Path(), FILE_OR_FOLDER.findall(row)
        for name in names:
            path = root / name if "/" in name else folder / name
            folder = path if path.is_dir() else path.parent
            lost += [] if path.exists() else [f"{name}: {row[:60]}"]
        rows_read += bool(names)
    assert lost == []
    assert rows_read > 50


@pytest.mark.parametrize("name", [*MAPS, "../CONTRIBUTING.md"])
def test_what_is_named_in_a_file_is_defined_there(root: Path, page: Any, name: str) -> None:
    """`Thing` in `file`, or `Thing` (`file`): a class, function, constant, field, member, or a name in C."""
    named = set(NAME_IN_FILE.findall(re.sub(r"\s+", " ", page(name).text)))
    assert named
    elsewhere = []
    for thing, file in named:
        definition = rf"(?m)^\s*(?:(?:async )?def |class |.*\s\*?(?=\w+\()|self\.)?{thing}\b\s*(?:$|[=:(\[])"
        elsewhere += [] if re.search(definition, (root / file).read_text()) else [f"{thing}: {file}"]
    assert elsewhere == []


OUR_COMMAND = re.compile(r"charonia |python -m (charonia|tests)\b")


def test_nothing_is_installed_from_an_index_that_does_not_have_it(root: Path, page: Any) -> None:
    """No index has the package: extras are named by the directory of the source, in pages and in messages."""
    texts = {each.path: each.text for each in (*map(page, PAGES), *(page(f"../{name}") for name in OTHERS))}
    folders = [package.parent for package in root.glob("*/__init__.py") if package.parent.name != "tests"]
    texts |= {path: path.read_text() for folder in folders for path in folder.rglob("*.py")}
    assert [path.name for path, text in texts.items() if re.search(r"charonia\[|pip install charonia", text)] == []
    assert (
        "pip install torch --index-url https://download.pytorch.org/whl/cpu && pip install '.[llm]'\n"
        in page("../README.md").text
    )


# flags.md


def test_tables_of_flags_are_those_of_the_options(page: Any) -> None:
    text = page("flags.md").text
    assert text == renewed(text), "python -m tests.docs.flag_tables"
    flags = [cells[0].strip("`") for cells in page("flags.md").rows("flag")]
    assert len(flags) == len(set(flags)), "a flag has two rows"
    assert {*flags} == {*option_rows()}


def test_a_table_of_flags_is_made_anew() -> None:
    text = (
        "| flag | default | meaning |\n|---|---|---|\n| `--no-such-flag` | none | x |\n"
        "| `--revision` | the hub's | x<br>See y. |\n| `--http-port` | `1` | x |\n"
    )
    lines = renewed(text).splitlines()
    assert lines[:2] == text.splitlines()[:2]
    assert "| `--revision` | the hub's | Branch, tag or commit of a hub id.<br>See y. |" in lines
    assert "| `--http-port` | `8000` | Port of the v2 and OpenAI protocols over HTTP. Also `--port`. |" in lines
    assert not [line for line in lines if "no-such-flag" in line]
    [added] = [line for line in lines if line.startswith("| `--model-control-mode`")]
    assert added.endswith("or requests. One of `none`, `poll`, `explicit`. |")


def test_every_level_of_kernels_and_attention_stands_there(page: Any, codes: Any) -> None:
    cells = {cells[0].strip("`"): codes(cells[2]) for cells in page("flags.md").rows("flag")}
    assert {*BACKENDS} <= {*cells["--attention"]}
    [kernels] = [codes(cells[1]) for cells in page("flags.md").rows("variable") if library.LEVEL_VARIABLE in cells[0]]
    assert {"portable"}.union(*library.LEVELS_OF.values()) <= {*kernels}


def test_every_flag_of_an_analysis_stands_there(page: Any, codes: Any) -> None:
    found = app["analyze"].assemble_argument_collection()
    told = set(re.findall(r"--[a-z-]+", page("analyze.md").text))
    assert [name for each in found for name in each.names[:1] if name.startswith("--") and name not in told] == []


def test_every_environment_variable_stands_there(root: Path, page: Any) -> None:
    folders = [package.parent for package in root.glob("*/__init__.py")]
    shipped = (path for folder in folders for path in folder.rglob("*.py") if path.parent.name != "python_stub")
    names = {
        name for path in shipped for name in re.findall(r"\"((?:CHARONIA|OTEL|TRITON)_[A-Z_]+)\"", path.read_text())
    }
    assert names
    told = "".join(page(name).text for name in PAGES)
    assert [name for name in names if name not in told] == []


def test_commands_are_understood(page: Any) -> None:
    pages = [*map(page, PAGES), page("../README.md"), page("../examples/README.md")]
    commands = {tuple(words) for each in pages for fence in each.fences() for words in commands_of(fence.text)}
    assert len(commands) > 10
    for command, *words in commands:
        module = importlib.import_module("charonia.cli.app" if command == "charonia" else command)
        if hasattr(module, "app"):
            module.app.parse_args(words, exit_on_error=False, print_error=False)


def commands_of(text: str) -> Iterator[list[str]]:
    """Our commands in a block, each a module and its arguments."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        command = re.sub(r"('[^']*')|\d?[<>|].*", lambda found: found[1] or "", line)
        words = shlex.split(command, comments=True) if OUR_COMMAND.match(line) else []
        if words:
            yield words[2:] if words[0] == "python" else words


def test_a_wrong_command_is_found() -> None:
    [(_, *words)] = commands_of("charonia serve ./x --no-such-flag  # told\n")
    with pytest.raises(CycloptsError):
        app.parse_args(words, exit_on_error=False, print_error=False)


def test_configurations_are_understood(page: Any) -> None:
    fences = [fence for name in PAGES for fence in page(name).fences()]
    assert all(isinstance(yaml.safe_load(fence.text), dict) for fence in fences if fence.language == "yaml")
    models = [fence.text for fence in (*fences, *page("../README.md").fences()) if fence.text.startswith("name: ")]
    assert models
    for text in models:
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
        parameters = {name: value.string_value for name, value in config.parameters.items()}
        if config.backend != "tensorrtllm":  # see tests/extras/trtllm
            parse_settings(parameters, EngineOptions)


def test_every_bench_and_make_target_stands_there(root: Path, page: Any) -> None:
    said = page("benchmarks.md").text
    paths = {path.relative_to(root / "bench").with_suffix(""): path for path in (root / "bench").rglob("*.py")}
    files = {".".join(path.parts): file.read_text() for path, file in paths.items()}
    runs = [name for name, text in files.items() if re.search(rf"python -m charonia.bench.{re.escape(name)}\b", text)]
    missing = [name for name in runs if not re.search(rf"`python -m charonia.bench.{re.escape(name)}\b", said)]
    assert missing == [], "add their commands to docs/benchmarks.md"
    named = set(re.findall(r"charonia\.bench\.(\w+(?:\.\w+)*)", said))
    assert named <= files.keys()
    targets = set(re.findall(r"^([a-z]+):.*##", (root / "Makefile").read_text(), re.MULTILINE))
    made = re.findall(r"`make ([a-z]+)\b", "\n".join(page(name).text for name in PAGES))
    assert set(made) <= targets


# clients.md


def test_every_route_stands_there(page: Any, codes: Any) -> None:
    options = ServeOptions()
    plans = plan_extensions(options.extensions, server_facts(options, endpoint_settings(options)))
    metrics = MetricRegistries(CollectorRegistry())
    outer: Any = build_app(cast(Any, None), ServerInfo(), metrics=metrics, extensions=RouteExtensions(plans))
    while not hasattr(outer, "routes"):
        outer = outer._app
    served = {(method, plain(route.path)) for route in outer.routes for method in route.methods - {"HEAD"}}
    rows = [codes(cells[0])[0] for cells in page("clients.md").rows("endpoint")]
    told = {(method, path) for method, _, path in (row.partition(" ") for row in rows)}
    assert served - told == set(), "add to a table of endpoints in docs/clients.md"
    assert told - served == set(), "docs/clients.md has endpoints that are not there"


def plain(path: str) -> str:
    """A route's path without converters."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        (
            "What chooses tokens",
            {*SamplingParams.__struct_fields__, *request_parameters._ALIASES} - {*LOGPROBS, *MANNERS},
        ),
        (
            "What else v2 takes",
            {
                *request_parameters.ResponseOptions.__struct_fields__,
                *request_parameters._UNSUPPORTED,
                *MANNERS,
                "logprobs",
            }
            - {"n", *FOREIGN_PARAMETERS},
        ),
        (
            "What else OpenAI's API takes",
            {*schemas.ChatBody.__struct_fields__, *schemas.CompletionBody.__struct_fields__}
            - {*SamplingParams.__struct_fields__, "n", "max_completion_tokens"}
            | {*LOGPROBS, *json_body.IGNORED_FIELDS, *chat_messages.MESSAGE_NO_OP_VALUES}
            | {*schemas.CHAT_NO_OP_VALUES} - FOREIGN_PARAMETERS,
        ),
        (
            "HTTP: tokens",
            {*schemas.TokenizeBody.__struct_fields__, *schemas.DetokenizeBody.__struct_fields__}
            | {*schemas.TOKENIZE_NO_OP_VALUES},
        ),
        ("What other servers take", {*FOREIGN_PARAMETERS}),
        ("gRPC", {spec.name for spec in infer.OWN_LAYOUT.inputs}),
    ],
)
def test_every_field_stands_there(heading: str, names: set[str], page: Any, codes: Any) -> None:
    told = " ".join(codes(page("clients.md").section(heading)))
    missing = [name for name in sorted(names) if not re.search(rf"\b{name}\b", told)]
    assert missing == [], f"say in docs/clients.md, '{heading}', what they do"


def test_every_field_of_a_response_stands_there(page: Any, codes: Any) -> None:
    told = set(codes(page("responses.md").section("The body")))
    fields = {*responses_request.ResponsesBody.__struct_fields__, *responses_request.IGNORED}
    assert sorted(fields - told) == [], "say in docs/responses.md, 'The body', what they do"
    assert {*responses_request.NO_OP_VALUES} - {"n", *FOREIGN_PARAMETERS} <= told


def test_every_field_of_a_message_stands_there(page: Any, codes: Any) -> None:
    told = set(codes(page("messages.md").section("The body")))
    fields = {*messages_request.MessagesBody.__struct_fields__, *messages_request.MessageTool.__struct_fields__} - {
        "type"
    }
    no_ops = {*messages_request.NO_OP_VALUES} - FOREIGN_PARAMETERS
    known = fields | messages_request.IGNORED | no_ops
    assert sorted(known - told) == [], "say in docs/messages.md, 'The body', what they do"


def test_every_engine_argument_of_model_json_stands_there(page: Any, codes: Any) -> None:
    told = set(codes(page("repositories.md").text))
    assert sorted(OWN_NAMES.keys() - told) == [], "say in docs/repositories.md that model.json may have them"


def test_every_output_stands_there(page: Any) -> None:
    said = page("clients.md").text
    assert [spec.name for spec in infer.OWN_LAYOUT.output_specs if spec.name not in said] == []


# architecture.md, inside.md, life-of-a-request.md


def source_files(text: str) -> set[str]:
    return set(re.findall(r"`([\w/]+\.(?:py|c))`", text))


def test_every_file_that_the_maps_name_is_there(root: Path, page: Any) -> None:
    named = {file for name in MAPS for file in source_files(page(name).text)}
    assert sorted(name for name in named if "/" in name and not (root / name).is_file()) == []


def test_the_life_of_a_request_is_short_to_follow(page: Any) -> None:
    assert len(source_files(page("life-of-a-request.md").text)) <= 25
