"""What `charonia import` writes for a file or directory: the kind of model, its files' places, its config and its name.

Knows what the files of each kind look like; what is in them is the backends' to read.
"""

import json
import mmap
import os
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..core.errors import InvalidArgument, NotFound, Unsupported
from ..core.gguf_files import GGUF_SUFFIX, gguf_model_name, shard_paths
from ..repository.backend_registry import LANGUAGE_MODEL_BACKEND, torch_config_guesser
from ..repository.config_defaults import detect_checkpoint_backend
from ..repository.config_io import config_to_text, find_config
from ..repository.model_source import find_versions, is_checkpoint, is_repository

MODEL_FILES = {".onnx": "model.onnx", ".pt": "model.pt", ".pth": "model.pt", ".ts": "model.pt", ".pt2": "model.pt2"}
"""Ending of a model's file -> its name in a version's folder."""

PICKLES = (".pkl", ".pickle", ".joblib")
_FORESTS = {
    "xgboost_json": ("xgboost.json", "XGBoost"),
    "xgboost_ubj": ("xgboost.ubj", "XGBoost"),
    "lightgbm": ("model.txt", "LightGBM"),
    "treelite_checkpoint": ("checkpoint.tl", "treelite"),
}
"""`model_type` of a forest -> its file in a version's folder, and whose it is."""

SAVED_MODEL = ".savedmodel"

_SETTINGS = '# Settings of its engine: parameters { key: "max_num_seqs" value { string_value: "32" } }\n'
_PLAIN_NAMES = re.compile(r"model|onnx|[0-9]+")
"""Names of files and folders that say nothing of a model."""

_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/[^/]+")
_MAX_NAME_BYTES = 255


_NEMO_PARTS = ("context", "weights")


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
        plan = file_plan(_only_model_file(path) if path.is_dir() else path)
    return replace(plan, name=check_model_name(name) if name else guess_model_name(path))


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
    return ", ".join(str(field) for field in known if field)


def _only_model_file(directory: Path) -> Path:
    if find_config(directory) is not None or find_versions(directory) or is_repository(directory):
        raise InvalidArgument(f"'{directory}' is a model repository, or a model of one, already: charonia check tells")
    files = sorted(file for file in directory.iterdir() if file.suffix in MODEL_FILES and file.is_file())
    usual = [file for file in files if file.name in MODEL_FILES.values()]
    if len(files) == 1 or len(usual) == 1:
        return (usual or files)[0]
    if files:
        raise InvalidArgument(f"'{directory}' has several models: name one, {', '.join(file.name for file in files)}")
    raise InvalidArgument(
        f"'{directory}' is no model that is known here: it has neither config.json nor modules.json, as checkpoints "
        f"have, nor a file that ends with {', '.join(MODEL_FILES)}"
    )


def file_plan(file: Path) -> ImportPlan:
    if not file.is_file():
        raise InvalidArgument(f"'{file}' is neither a file nor a directory")
    if file.suffix == GGUF_SUFFIX:
        parts = tuple(ImportedFile(shard, f"1/{shard.name}") for shard in shard_paths(file) if shard.exists())
        return ImportPlan("", "a language model in GGUF", parts, _config_text(LANGUAGE_MODEL_BACKEND) + _SETTINGS)
    if forest := _forest_type(file):
        return forest_plan(file, forest)
    if file.suffix == ".xml":
        weights = file.with_suffix(".bin")
        beside = (ImportedFile(weights, "1/model.bin"),) if weights.is_file() else ()
        return ImportPlan(
            "", "an OpenVINO model", (ImportedFile(file, "1/model.xml"), *beside), _config_text("openvino")
        )
    if file.suffix in PICKLES:
        raise Unsupported(f"'{file}' is a pickle, which runs whatever it says: --trust-pickle makes a checkpoint of it")
    if file.suffix not in MODEL_FILES:
        hint = "; of a checkpoint, name the directory" if file.suffix in (".safetensors", ".bin", ".json") else ""
        known = f"{', '.join((*MODEL_FILES, '.xml'))} or {GGUF_SUFFIX}, or are a forest's .json, .ubj, .txt or .tl"
        raise InvalidArgument(f"'{file}' is no model that is known here: those end with {known}{hint}")
    place = MODEL_FILES[file.suffix]
    files = [ImportedFile(file, f"1/{place}")]
    if file.suffix == ".onnx":
        files += [ImportedFile(weights, f"1/{weights.name}") for weights in _named_within(file)]
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


def forest_plan(file: Path, model_type: str, classes: bool = False) -> ImportPlan:
    place, library = _FORESTS[model_type]
    parameters = {"model_type": model_type} | ({"output_class": "true"} if classes else {})
    lines = (
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parameters.items()
    )
    text = _config_text("fil") + "".join(lines)
    return ImportPlan("", f"a forest of {library}", (ImportedFile(file, f"1/{place}"),), text)


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


def guess_model_name(path: Path) -> str:
    """The name of a file or folder, or of the first one around it that says something."""
    path = path.absolute()
    snapshot = _SNAPSHOT.fullmatch(str(path))
    if snapshot:
        return check_model_name(snapshot[1].rpartition("--")[2])
    names = [
        path.name.removesuffix(SAVED_MODEL) if path.is_dir() else gguf_model_name(path),
        *(parent.name for parent in path.parents),
    ]
    telling = (name for name in names if name and not _PLAIN_NAMES.fullmatch(name))
    plain = re.sub(r"[^\w.-]+", "-", next(telling, "model")).strip("-.")
    return check_model_name(plain or "model")


def check_model_name(name: str) -> str:
    fits = name not in ("", ".", "..") and not name.startswith(".") and not set(name) & {"/", "\\", "\0"}
    try:
        fits = fits and len(name.encode()) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise InvalidArgument(f"{name!r} is no name of a model: choose another --name, of a folder")
    return name
