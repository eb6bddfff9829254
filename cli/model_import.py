"""`charonia import`: plans a model's folder for a checkpoint or a model's file, writes it into a repository, judges it
as `charonia check` does, and says how to try it.

Knows what the files of each kind look like; what is in them is the backends' to read.
"""

import json
import mmap
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from ..core.errors import AlreadyExists, CharoniaError, InvalidArgument, NotFound, Unsupported
from ..core.gguf_files import GGUF_SUFFIX, gguf_model_name, shard_paths
from ..core.model import ModelConfig
from ..core.tensor import TensorSpec
from ..repository.backend_registry import ENCODER_BACKEND, LANGUAGE_MODEL_BACKEND, torch_config_guesser
from ..repository.catalog import RepositoryCatalog
from ..repository.config_defaults import detect_checkpoint_backend
from ..repository.config_io import config_to_text, find_config
from ..repository.config_options import ConfigOptions
from ..repository.model_source import find_versions, is_checkpoint, is_repository
from .repository_check import CheckedModel, model_checker

_MODEL_FILES = {".onnx": "model.onnx", ".pt": "model.pt", ".pth": "model.pt", ".ts": "model.pt", ".pt2": "model.pt2"}
"""Ending of a model's file -> its name in a version's folder."""

_PICKLES = (".pkl", ".pickle", ".joblib")
_FORESTS = {
    "xgboost_json": ("xgboost.json", "XGBoost"),
    "xgboost_ubj": ("xgboost.ubj", "XGBoost"),
    "lightgbm": ("model.txt", "LightGBM"),
    "treelite_checkpoint": ("checkpoint.tl", "treelite"),
}
"""`model_type` of a forest -> its file in a version's folder, and whose it is."""

_SAVED_MODEL = ".savedmodel"
_UNSUPPORTED_OPERATORS = re.compile(r"Unsupported ops: Counter\(\{(.*)\}\)")
"""What tf2onnx says where it goes on and writes a model that nothing runs."""

_SETTINGS = '# Settings of its engine: parameters { key: "max_num_seqs" value { string_value: "32" } }\n'
_PLAIN_NAMES = re.compile(r"model|onnx|[0-9]+")
"""Names of files and folders that say nothing of a model."""

_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/[^/]+")
_MAX_NAME_BYTES = 255


_NEMO_PARTS = ("context", "weights")
"""The folders of a checkpoint of NeMo 2."""


class ImportedFile(NamedTuple):
    """A file or directory, and its name in the model's folder."""

    source: Path
    place: str


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """What is written for a model. `kind`: for people. `config`: the text of config.pbtxt."""

    name: str
    kind: str
    files: tuple[ImportedFile, ...]
    config: str


def locate_source(source: str) -> Path:
    """The path itself, or the snapshot of a hub id in the Hugging Face cache. Raises `NotFound` for neither."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    from huggingface_hub import constants, snapshot_download

    hub_id, _, revision = source.partition("@")
    try:
        return Path(snapshot_download(hub_id, revision=revision or None, local_files_only=True))
    except (OSError, ValueError):
        message = f"'{source}' is no path, and not in the Hugging Face cache ({constants.HF_HUB_CACHE}) either; "
        raise NotFound(
            f"{message}nothing is fetched here: hf download {shlex.quote(hub_id)}, if it is a hub id"
        ) from None


def plan_import(path: Path, name: str = "") -> ImportPlan:
    """What to write for a file or directory that is there. Reads small files, and of TorchScript the model itself.

    Raises:
        CharoniaError: it is no model, or one that has to be exported first; the message says how.
    """
    _refuse_nemo(path)
    if path.is_dir() and is_checkpoint(path):
        plan = _checkpoint_plan(path)
    else:
        plan = _file_plan(_only_model_file(path) if path.is_dir() else path)
    return replace(plan, name=_checked_name(name) if name else _guessed_name(path))


def _refuse_nemo(path: Path) -> None:
    if path.suffix != ".nemo" and not all((path / part).is_dir() for part in _NEMO_PARTS):
        return
    exported = f"{path.stem}-hf"
    raise Unsupported(
        f"'{path}' is a checkpoint of NeMo, which is not read here; with NeMo installed, export it first:\n"
        f"  nemo llm export path={shlex.quote(str(path.absolute()))} target=hf output_path={shlex.quote(exported)}\n"
        f"  charonia import {shlex.quote(exported)}\n"
        "A checkpoint of NeMo 1 is exported by its scripts/checkpoint_converters/convert_<model>_nemo_to_hf.py."
    )


def _checkpoint_plan(directory: Path) -> ImportPlan:
    backend = detect_checkpoint_backend(directory)
    kind = "a language model" if backend == LANGUAGE_MODEL_BACKEND else "an encoder"
    described = _described(directory / "config.json")
    text = _config_text(backend)
    if backend == LANGUAGE_MODEL_BACKEND:
        text += _SETTINGS
    return ImportPlan("", f"{kind} ({described})" if described else kind, (ImportedFile(directory, "1"),), text)


def _described(config: Path) -> str:
    """Class and dtype, or method of quantising, as a checkpoint's config has them; its check tells wrong ones."""
    try:
        fields = json.loads(config.read_bytes())
        stored = (fields.get("quantization_config") or {}).get("quant_method")
        known = [*(fields.get("architectures") or ())[:1], stored or fields.get("dtype") or fields.get("torch_dtype")]
    except (OSError, ValueError, AttributeError, TypeError):
        return ""
    return ", ".join(str(each) for each in known if each)


def _only_model_file(directory: Path) -> Path:
    if find_config(directory) is not None or find_versions(directory) or is_repository(directory):
        raise InvalidArgument(f"'{directory}' is a model repository, or a model of one, already: charonia check tells")
    found = sorted(file for file in directory.iterdir() if file.suffix in _MODEL_FILES and file.is_file())
    usual = [file for file in found if file.name in _MODEL_FILES.values()]
    if len(found) == 1 or len(usual) == 1:
        return (usual or found)[0]
    if found:
        raise InvalidArgument(f"'{directory}' has several models: name one, {', '.join(file.name for file in found)}")
    raise InvalidArgument(
        f"'{directory}' is no model that is known here: it has neither config.json nor modules.json, as checkpoints "
        f"have, nor a file that ends with {', '.join(_MODEL_FILES)}"
    )


def _file_plan(file: Path) -> ImportPlan:
    if not file.is_file():
        raise InvalidArgument(f"'{file}' is neither a file nor a directory")
    if file.suffix == GGUF_SUFFIX:
        parts = tuple(ImportedFile(each, f"1/{each.name}") for each in shard_paths(file) if each.exists())
        return ImportPlan("", "a language model in GGUF", parts, _config_text(LANGUAGE_MODEL_BACKEND) + _SETTINGS)
    if forest := _forest_type(file):
        return _forest_plan(file, forest)
    if file.suffix == ".xml":
        weights = file.with_suffix(".bin")
        beside = (ImportedFile(weights, "1/model.bin"),) if weights.is_file() else ()
        return ImportPlan(
            "", "an OpenVINO model", (ImportedFile(file, "1/model.xml"), *beside), _config_text("openvino")
        )
    if file.suffix in _PICKLES:
        raise Unsupported(f"'{file}' is a pickle, which runs whatever it says: --trust-pickle makes a checkpoint of it")
    if file.suffix not in _MODEL_FILES:
        hint = "; of a checkpoint, name the directory" if file.suffix in (".safetensors", ".bin", ".json") else ""
        raise InvalidArgument(
            f"'{file}' is no model that is known here: those end with {', '.join((*_MODEL_FILES, GGUF_SUFFIX))}{hint}"
        )
    place = _MODEL_FILES[file.suffix]
    files = [ImportedFile(file, f"1/{place}")]
    if file.suffix == ".onnx":
        files += [ImportedFile(each, f"1/{each.name}") for each in _named_within(file)]
        return ImportPlan("", "an ONNX model", tuple(files), _config_text("onnxruntime"))
    if file.suffix == ".pt2":
        return ImportPlan("", "an exported program of PyTorch", tuple(files), _config_text("pytorch"))
    guessed = torch_config_guesser()({"backend": "pytorch"}, file)
    text = (
        "# The file does not tell its tensors: types and dims were found out by running it. Look at them.\n"
        + config_to_text(guessed)
    )
    return ImportPlan("", "a TorchScript model, whose tensors are a guess", tuple(files), text)


def _forest_type(file: Path) -> str:
    """The `model_type` of a forest's file; empty for another file."""
    with file.open("rb") as opened:
        begin = opened.read(1 << 12)
    match file.suffix:
        case ".ubj":
            return "xgboost_ubj"
        case ".tl":
            return "treelite_checkpoint"
        case ".json" if b'"learner"' in begin:
            return "xgboost_json"
        case ".txt" if begin.startswith(b"tree\nversion="):
            return "lightgbm"
    return ""


def _forest_plan(file: Path, model_type: str, classes: bool = False) -> ImportPlan:
    place, library = _FORESTS[model_type]
    parameters = {"model_type": model_type} | ({"output_class": "true"} if classes else {})
    lines = (
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parameters.items()
    )
    text = _config_text("fil") + "".join(lines)
    return ImportPlan("", f"a forest of {library}", (ImportedFile(file, f"1/{place}"),), text)


def _unpickled(source: Path, directory: Path) -> ImportPlan:
    """A forest whose pickle is trusted: run in a process of its own, into a checkpoint in `directory`."""
    made = directory / f"{source.stem}.tl"
    module = f"{__package__.partition('.')[0]}.classic_backends.pickled_forests"
    command = [sys.executable, "-m", module, str(source), str(made)]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if run.returncode or not made.is_file():
        reason = next(reversed(run.stderr.strip().splitlines()), f"its process ended with {run.returncode}")
        raise InvalidArgument(f"'{source}' cannot be made a checkpoint: {reason}")
    classes = run.stdout.strip().endswith("classes")
    plan = _forest_plan(made, "treelite_checkpoint", classes)
    return replace(plan, name=_guessed_name(source), kind=f"a forest, unpickled from {source}")


def _is_saved_model(path: Path) -> bool:
    return (path / "saved_model.pb").is_file()


def _converted(source: Path, directory: Path) -> ImportPlan:
    """An ONNX model in `directory`, made of a SavedModel by tf2onnx in a process of its own. Raises `CharoniaError`,
    which tells how to serve the SavedModel itself."""
    if find_spec("tf2onnx") is None or find_spec("tensorflow") is None:
        needed = "to make an ONNX model of it takes pip install '.[tensorflow]'"
        raise Unsupported(f"'{source}' is a SavedModel of TensorFlow: {needed}")
    made = directory / _MODEL_FILES[".onnx"]
    command = [sys.executable, "-m", "tf2onnx.convert", "--saved-model", str(source), "--output", str(made)]
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", env=quiet, check=False)
    refused = _UNSUPPORTED_OPERATORS.search(run.stderr)
    if run.returncode or refused or not made.is_file():
        reason = next(reversed(run.stderr.strip().splitlines()), f"its process ended with {run.returncode}")
        if refused:
            reason = "tf2onnx does not know the operators " + ", ".join(re.findall(r"'(.*?)'", refused[1]))
        itself = f"as NAME/1/model{_SAVED_MODEL} in a repository TensorFlow runs it"
        raise InvalidArgument(f"'{source}' cannot be made an ONNX model: {reason}; {itself}")
    plan = _file_plan(made)
    return replace(plan, name=_guessed_name(source), kind=f"an ONNX model, made of the SavedModel {source}")


def _config_text(backend: str) -> str:
    note = "# Made by charonia import. What is not written here is completed from the model's files."
    return f'{note}\nbackend: "{backend}"\n'


def _named_within(model: Path) -> list[Path]:
    """The files beside an ONNX model that it names: its weights, where they lie apart."""
    others = [file for file in model.parent.iterdir() if file.is_file() and file.suffix != model.suffix]
    if not model.stat().st_size:
        return []
    with model.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        apart = content.find(b"location") >= 0  # the key in ONNX of where weights are
        return sorted(file for file in others if apart and content.find(os.fsencode(file.name)) >= 0)


def _guessed_name(path: Path) -> str:
    """The name of a file or folder, or of the first one around it that says something."""
    path = path.absolute()
    snapshot = _SNAPSHOT.fullmatch(str(path))
    if snapshot:
        return _checked_name(snapshot[1].rpartition("--")[2])
    names = [
        path.name.removesuffix(_SAVED_MODEL) if path.is_dir() else gguf_model_name(path),
        *(parent.name for parent in path.parents),
    ]
    telling = (name for name in names if name and not _PLAIN_NAMES.fullmatch(name))
    plain = re.sub(r"[^\w.-]+", "-", next(telling, "model")).strip("-.")
    return _checked_name(plain or "model")


def _checked_name(name: str) -> str:
    fits = name not in ("", ".", "..") and not name.startswith(".") and not set(name) & {"/", "\\", "\0"}
    try:
        fits = fits and len(name.encode()) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise InvalidArgument(f"{name!r} is no name of a model: choose another --name, of a folder")
    return name


_FREE_SIZE = 8
"""The size that a free dimension has in the line to try."""

_MAX_SHOWN = 32
"""Elements that are written out in it."""


def import_model(source: str, repository: Path, name: str, copied: bool, trust_pickle: bool = False) -> None:
    """Make a folder in the repository for what `source` names, check it, and say what was found out and how to try it.
    `trust_pickle`: a pickle may run.

    Raises:
        CharoniaError: it cannot be served, or not be written; nothing is left behind.
    """
    try:
        path = locate_source(source)
        if not (_is_saved_model(path) or (trust_pickle and path.suffix in _PICKLES)):
            _import(plan_import(path, name), repository, copied)
            return
        with tempfile.TemporaryDirectory(prefix="charonia-import-") as made:
            plan = _converted(path, Path(made)) if _is_saved_model(path) else _unpickled(path, Path(made))
            _import(replace(plan, name=_checked_name(name)) if name else plan, repository, copied=True)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise InvalidArgument(f"cannot import into '{repository}': {error.strerror or error}{where}") from None


def _import(plan: ImportPlan, repository: Path, copied: bool) -> None:
    target = _free_place(plan, repository)
    repository.mkdir(parents=True, exist_ok=True)
    # A folder that begins with a dot is no model: a server that follows the repository sees the whole at once.
    with tempfile.TemporaryDirectory(prefix=".import-", dir=repository) as scratch:
        _write(plan, Path(scratch) / plan.name, copied)
        checked = _check(plan, Path(scratch))
        (Path(scratch) / plan.name).rename(target)
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
