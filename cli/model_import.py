"""`charonia import`: writes a model's folder into a repository, judges it as `charonia check` does, and says how to try
it."""

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..core.errors import AlreadyExists, CharoniaError, InvalidArgument
from ..core.model import ModelConfig
from ..core.tensor import TensorSpec
from ..repository.catalog import RepositoryCatalog
from ..repository.config_defaults import ENCODER_BACKEND, LANGUAGE_MODEL_BACKEND
from ..repository.model_source import is_checkpoint
from .import_plan import ImportPlan, locate_source, plan_import
from .options import ConfigOptions
from .repository_check import CheckedModel, model_checker

_FREE_SIZE = 8
"""The size that a free dimension has in the line to try."""

_MAX_SHOWN = 32
"""Elements that are written out in it."""


def import_model(source: str, repository: Path, name: str, copied: bool) -> None:
    """Make a folder in the repository for what `source` names, check it, and say what was found out and how to try it.

    Raises:
        CharoniaError: it cannot be served, or not be written; nothing is left behind.
    """
    try:
        plan = plan_import(locate_source(source), name)
        target = _free_place(plan, repository)
        repository.mkdir(parents=True, exist_ok=True)
        # A folder that begins with a dot is no model: a server that follows the repository sees the whole at once.
        with tempfile.TemporaryDirectory(prefix=".import-", dir=repository) as scratch:
            _write(plan, Path(scratch) / plan.name, copied)
            checked = _check(plan, Path(scratch))
            (Path(scratch) / plan.name).rename(target)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise InvalidArgument(f"cannot import into '{repository}': {error.strerror or error}{where}") from None
    _print_report(plan, checked, target, copied)


def _free_place(plan: ImportPlan, repository: Path) -> Path:
    """The folder of the model. Raises `CharoniaError` where none can be made."""
    target, source = repository / plan.name, plan.files[0].source
    if os.path.lexists(target):
        raise AlreadyExists(f"'{target}' is there already: choose another --name")
    if repository.is_dir() and is_checkpoint(repository):
        raise InvalidArgument(f"'{repository}' is a checkpoint and no model repository: choose another --into")
    if source.is_dir() and repository.resolve().is_relative_to(source.resolve()):
        raise InvalidArgument(f"'{repository}' lies within '{source}': choose another --into")
    return target


def _check(plan: ImportPlan, scratch: Path) -> CheckedModel:
    """The model in `scratch`, judged; messages name the files that it was made from."""
    try:
        with model_checker(ConfigOptions()) as check:
            checked = check(RepositoryCatalog([scratch]).read(plan.name))
        if not checked.config.inputs:
            raise InvalidArgument(
                "its file does not declare its tensors: write its config by hand, with input and output"
            )
    except CharoniaError as error:
        message = error.message
        for source, place in plan.files:
            message = message.replace(str(scratch / plan.name / place), str(source))
        other = next(iter(sorted(plan.files[0].source.rglob("*.onnx"))), None)
        hint = f"; but there is {other}, which can be imported by itself" if other is not None else ""
        raise type(error)(f"'{plan.files[0].source}' would not load: {message}{hint}", field=error.field) from None
    return checked


def _write(plan: ImportPlan, folder: Path, copied: bool) -> None:
    folder.mkdir()
    (folder / "config.pbtxt").write_text(plan.config)
    for source, place in plan.files:
        target = folder / place
        target.parent.mkdir(exist_ok=True)
        if not copied:
            target.symlink_to(source.absolute())
        elif source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(".git", ".cache"))
        else:
            shutil.copyfile(source, target)


def _print_report(plan: ImportPlan, checked: CheckedModel, target: Path, copied: bool) -> None:
    config = checked.config
    said = f"{target}: {plan.kind}, {'copied' if copied else 'linked'} from {plan.files[0].source}"
    print(said.encode(errors="backslashreplace").decode())  # names of files need not be text
    if config.backend != LANGUAGE_MODEL_BACKEND:  # whose tensors are always the same
        print(f"  max_batch_size  {config.max_batch_size}")
        for side, specs in (("input", config.inputs), ("output", config.outputs)):
            for spec in specs:
                optional = " optional" if spec.optional else ""
                print(f"  {side:14}  {spec.name} {spec.datatype} {list(spec.dims)}{optional}")
    for finding in checked.findings:
        print(f"  check           {finding}")
    repository = shlex.quote(str(target.parent)).encode(errors="backslashreplace").decode()
    print(f"Try it:\n  charonia serve --model-repository {repository}")
    print(f"  {curl_line(config)}")


def curl_line(config: ModelConfig) -> str:
    """A command line that asks a model something."""
    base, model = "localhost:8000", f"/v2/models/{quote(config.name)}"
    inputs = {spec.name for spec in config.inputs}
    if config.backend == LANGUAGE_MODEL_BACKEND:
        return _curl(f"-N {base}{model}/generate_stream", {"text_input": "Once upon a time", "max_tokens": 32})
    if config.backend != ENCODER_BACKEND:
        return _tensor_curl(f"-s {base}{model}/infer", config)
    if "text_pair" not in inputs:
        return _curl(f"-s {base}/v1/embeddings", {"model": config.name, "input": ["some text", "another"]})
    if config.outputs[0].dims == (1,):
        question = {"model": config.name, "query": "what is it", "documents": ["some text", "another"]}
        return _curl(f"-s {base}/v1/rerank", question)
    return _curl(f"-s {base}{model}/infer", {"inputs": [_text("text_input", "some text")]})


def _text(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [text]}


def _curl(call: str, body: Any) -> str:
    return f"curl {call} -d {shlex.quote(json.dumps(body))}"


def _tensor_curl(call: str, config: ModelConfig) -> str:
    """Zeros for each input; a tensor that is too long for a line is made by Python."""
    inputs = [_zeros(spec, config.max_batch_size > 0) for spec in config.inputs if not spec.optional]
    if all(len(each["data"]) <= _MAX_SHOWN for each in inputs):
        return _curl(call, {"inputs": inputs})
    texts = [
        json.dumps({**each, "data": None}).replace("null", f"[{json.dumps(each['data'][0])}] * {len(each['data'])}")
        for each in inputs
    ]
    program = f'import json; print(json.dumps({{"inputs": [{", ".join(texts)}]}}))'
    return f"python3 -c {shlex.quote(program)} | curl {call} -d @-"


def _zeros(spec: TensorSpec, batched: bool) -> dict[str, Any]:
    dims: Sequence[int] = [_FREE_SIZE if dim < 0 else dim for dim in spec.dims]
    shape = [1, *dims] if batched else list(dims)
    element = "text" if spec.datatype == "BYTES" else 0
    return {"name": spec.name, "shape": shape, "datatype": spec.datatype, "data": [element] * prod(shape)}
