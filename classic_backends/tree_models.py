"""The `fil` backend: forests of trees of XGBoost, LightGBM and treelite, evaluated by treelite on the CPU.

treelite is the extra `trees`; by default a process of its own imports it, and parses the files. Source:
https://github.com/triton-inference-server/fil_backend/blob/main/docs/model_config.md.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument
from ..core.model import MemoryNeed, ModelConfig, RawConfig
from ..core.runtime import Arrays, InstancePlacement, Parameters, Runtime, RuntimeLoader
from .backend_config import (
    FoundModel,
    FoundTensor,
    check_config_matches,
    complete_config,
    declares_tensors,
    memory_per_instance,
    read_choice,
    read_flag,
    read_number,
    read_thread_count,
    warn_unknown_parameters,
)
from .library_models import import_library, require_file

_FILES = {
    "xgboost": "xgboost.model",
    "xgboost_json": "xgboost.json",
    "xgboost_ubj": "xgboost.ubj",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}
"""`model_type` -> its file."""

_INPUT = "input__0"
_OUTPUT = "output__0"
_MODEL_TYPE = "model_type"
_CLASSES = "output_class"
_THRESHOLD = "threshold"
_PROBABILITIES = "predict_proba"
_THREADS = "cpu_nthread"
_OF_GPUS = (
    "storage_type",
    "algo",
    "blocks_per_sm",
    "threads_per_tree",
    "transfer_threshold",
    "use_experimental_optimizations",
)
_KNOWN_PARAMETERS = {_MODEL_TYPE, _CLASSES, "is_classifier", _THRESHOLD, _PROBABILITIES, _THREADS, *_OF_GPUS}
_KNOWN_PARAMETERS |= {"chunk_size", "xgboost_allow_unknown_field", "default-max-batch-size"}


def import_treelite() -> Any:
    """The module. Raises `Unsupported` where it is not installed."""
    return import_library("treelite", "tree models", "trees")


class ForestOutput(NamedTuple):
    """The answer that is made of a forest's scores: the number of the class if `classes`, else the scores; with
    `probabilities` those of all classes. `threshold`: of the second of two classes."""

    classes: bool
    probabilities: bool
    threshold: float

    def of(self, scores: NDArray[Any]) -> NDArray[np.float32]:
        """`scores`: [rows, classes], or [rows, 1] of two classes or none."""
        if self.probabilities:
            probabilities = np.hstack([1 - scores, scores]) if scores.shape[1] == 1 else scores
            return np.asarray(probabilities, np.float32)
        if not self.classes:
            return np.asarray(scores, np.float32)
        chosen = scores > self.threshold if scores.shape[1] == 1 else scores.argmax(axis=1)[:, None]
        return np.asarray(chosen, np.float32)


def _read_output(parameters: Parameters) -> ForestOutput:
    """Raises `InvalidArgument` for a wrong parameter; `field` names it."""
    classes = read_flag(parameters, "is_classifier", False) or read_flag(parameters, _CLASSES, False)
    return ForestOutput(classes, read_flag(parameters, _PROBABILITIES, False), read_number(parameters, _THRESHOLD, 0.5))


class Forest:
    """A loaded model of trees. Raises `InvalidArgument` if its file is none, or has several targets."""

    def __init__(self, file: Path, model_type: str, unknown_fields: bool) -> None:
        treelite = import_treelite()
        frontend = treelite.frontend
        try:
            match model_type:
                case "xgboost":
                    self._model = frontend.load_xgboost_model_legacy_binary(file)
                case "lightgbm":
                    self._model = frontend.load_lightgbm_model(file)
                case "treelite_checkpoint":
                    self._model = treelite.Model.deserialize(file)
                case _:
                    form = "json" if model_type == "xgboost_json" else "ubjson"
                    self._model = frontend.load_xgboost_model(
                        file, format_choice=form, allow_unknown_field=unknown_fields
                    )
        except treelite.core.TreeliteError as error:
            reason = next(iter(str(error).splitlines()), "")
            raise InvalidArgument(f"treelite cannot load {file} as {model_type}: {reason}") from error
        self._predict = treelite.gtil.predict
        self.features = int(self._model.num_feature)
        shape = self.scores(np.zeros((1, self.features), np.float32), 1).shape
        if len(shape) != 2:
            raise InvalidArgument(f"{file} is a forest of {shape[1]} targets; one is served")
        self.columns = shape[1]

    def scores(self, rows: NDArray[Any], threads: int) -> NDArray[Any]:
        """[rows, classes], or [rows, 1]; of several targets [rows, targets, classes]. With 0 `threads` all of
        OpenMP's."""
        scores = self._predict(self._model, rows.astype(self._model.input_type, copy=False), nthread=threads)
        if scores.ndim == 3 and scores.shape[1] == 1:
            return np.asarray(scores[:, 0])
        return np.asarray(scores.reshape(len(rows), -1, *scores.shape[2:]))


class ForestLoader(RuntimeLoader):
    """Loads the file of the `model_type`, or the `default_model_filename`. Triton's parameters; those of GPUs have no
    effect."""

    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> Runtime:
        warn_unknown_parameters(config.name, parameters, _KNOWN_PARAMETERS)
        forest = _open(directory, config.raw, parameters)
        output = _read_output(parameters)
        check_config_matches(config, _found(forest, output))
        threads = read_thread_count(parameters, _THREADS)
        try:
            forest.scores(np.zeros((1, forest.features), np.float32), threads)
        except import_treelite().core.TreeliteError as error:  # more than OpenMP has
            reason = str(error).rpartition("Check failed: ")[2]
            raise InvalidArgument(f"parameter '{_THREADS}' is too large: {reason}", field=_THREADS) from None
        return ForestRuntime(forest, output, threads)

    def needs(self, directory: Path, raw: RawConfig, parameters: Parameters) -> tuple[MemoryNeed, ...]:
        """The host's, wherever instances are said to be."""
        needs = memory_per_instance(raw, _model_file(directory, raw, parameters))
        return tuple(need._replace(gpu=None) for need in needs)

    def complete(self, directory: Path, raw: RawConfig, parameters: Parameters) -> RawConfig:
        if declares_tensors(raw):
            return raw
        forest = _open(directory, raw, parameters)
        return complete_config(raw, _found(forest, _read_output(parameters)), parameters)


def _found(forest: Forest, output: ForestOutput) -> FoundModel:
    columns = max(forest.columns, 2) if output.probabilities else 1 if output.classes else forest.columns
    rows = FoundTensor(_INPUT, "FP32", (-1, forest.features))
    return FoundModel((rows,), (FoundTensor(_OUTPUT, "FP32", (-1, columns)),))


def _open(directory: Path, raw: RawConfig, parameters: Parameters) -> Forest:
    """Raises `NotFound` without the file."""
    file = _model_file(directory, raw, parameters)
    require_file(file)
    unknown = read_flag(parameters, "xgboost_allow_unknown_field", False)
    return Forest(file, _model_type(parameters), unknown)


def _model_type(parameters: Parameters) -> str:
    return read_choice(parameters, _MODEL_TYPE, _FILES, "xgboost")


def _model_file(directory: Path, raw: RawConfig, parameters: Parameters) -> Path:
    name = raw.get("default_model_filename")
    usual = _FILES[_model_type(parameters)]
    return directory / (name if name and name != "model.fil" else usual)


class ForestRuntime(Runtime):
    """One instance, with a forest of its own."""

    def __init__(self, forest: Forest, output: ForestOutput, threads: int) -> None:
        self._forest = forest
        self._output = output
        self._threads = threads

    def execute(self, inputs: Arrays, output_names: Sequence[str]) -> Iterator[Arrays]:
        rows = inputs[_INPUT]
        if not len(rows):
            yield {_OUTPUT: np.zeros((0, 1), np.float32)}
            return
        yield {_OUTPUT: self._output.of(self._forest.scores(rows, self._threads))}


FIL = ForestLoader()
