"""What is analyzed: a model that takes the load, with the models that it asks, in a repository.

A checkpoint on its own becomes a repository of one model. Reads configs; loads nothing.
"""

from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ...core.errors import InvalidArgument, NotFound, Unsupported
from ...core.model import RawConfig
from ...repository.backend_registry import LANGUAGE_MODEL_BACKEND, PIPELINE_BACKEND, is_text_backend
from ...repository.catalog import RepositoryCatalog
from ...repository.config_io import complete_fields, config_to_text
from ...repository.file_marks import files_mark
from ...repository.model_source import ModelSource, checkpoint_source, in_order_of_need, is_repository


class TunedModels(NamedTuple):
    """`models`: the one that takes the load last, before it those that it asks. `is_checkpoint`: it is one on its own,
    so that flags and no config are what comes of it."""

    repository: Path
    models: tuple[ModelSource, ...]
    is_checkpoint: bool = False

    @property
    def loaded(self) -> ModelSource:
        """The model that takes the load."""
        return self.models[-1]

    @property
    def is_graph(self) -> bool:
        return len(self.models) > 1

    def digest(self) -> str:
        """Another one as soon as a file or a config of the models changes."""
        marks = [
            (source.name, [version.mark or _mark_of(version.path) for version in source.versions])
            for source in self.models
        ]
        return sha256(repr(marks).encode()).hexdigest()[:16]


def _mark_of(checkpoint: str) -> Hashable:
    """The mark of a checkpoint on its own; none of a hub id, whose files nobody changes."""
    path = Path(checkpoint)
    if path.is_file():
        status = path.stat()
        return path.name, status.st_mtime_ns, status.st_size
    return files_mark(path) if path.exists() else checkpoint


@contextmanager
def open_models(source: str, model: str) -> Iterator[TunedModels]:
    """The models of a repository, a checkpoint directory, a file in GGUF, or a hub id. `model`: which of a repository
    takes the load; may be empty if there is one.

    Raises:
        InvalidArgument, NotFound: `source` is nothing of that, or has no such model, or several.
        Unsupported: the model cannot be put under load, or not be configured from here.
    """
    path = Path(source)
    with ExitStack() as stack:
        if path.is_dir() and is_repository(path):
            models = _models_of(path.resolve(), model)
        else:
            single = checkpoint_source(source, (model,) if model else ())
            repository = Path(stack.enter_context(TemporaryDirectory(prefix="charonia-analyze-")))
            _write_single(repository, single)
            # Its own mark tells nothing: what lies in the scratch folder is only a name.
            models = TunedModels(repository, (single,), is_checkpoint=True)
        for tuned in models.models:
            _check(tuned)
        yield models


def _models_of(repository: Path, model: str) -> TunedModels:
    catalog = RepositoryCatalog([repository])
    names = catalog.model_names()
    if not model:
        if len(names) != 1:
            raise InvalidArgument(f"{repository} has several models: name one with --model, of {', '.join(names)}")
        [model] = names
    if model not in names:
        raise NotFound(f"there is no model '{model}' in {repository}, only {', '.join(names)}")
    sources: dict[str, ModelSource] = {}
    wanted = [model]
    while wanted:
        name = wanted.pop()
        if name not in sources:
            sources[name] = catalog.read(name)
            wanted += [
                step for step in sources[name].steps if step in names or step not in sources[name].optional_steps
            ]
    ordered = in_order_of_need(sources[name] for name in sorted(sources))
    last = [source for source in ordered if source.name == model]
    return TunedModels(repository, (*(source for source in ordered if source.name != model), *last))


def _write_single(repository: Path, single: ModelSource) -> None:
    """A repository of the one model: our engine reads the checkpoint where it lies, others want it in their version."""
    folder = repository / single.name
    [version] = single.versions
    folder.mkdir()
    config = single.config
    if single.backend == LANGUAGE_MODEL_BACKEND:
        (folder / "1").mkdir()
        config = {**config, "parameters": {**config["parameters"], "model": {"string_value": version.path}}}
    else:
        (folder / "1").symlink_to(version.path)
    (folder / "config.pbtxt").write_text(config_to_text(config))


def _check(source: ModelSource) -> None:
    if "sequence_batching" in source.config:
        message = "is stateful: its requests belong to sequences, which no load of independent requests makes"
        raise Unsupported(f"model '{source.name}' {message}")
    if is_text_backend(source.backend) and not is_language_model(source.config):
        message = f"has the backend {source.backend}, whose settings are not those of a config"
        raise Unsupported(f"model '{source.name}' {message}: analyze its checkpoint instead")


def with_batching(source: ModelSource, completed: RawConfig) -> ModelSource:
    """The model with the largest batch of the config that a server completed, and with its batcher."""
    config = {**source.config, "max_batch_size": completed["max_batch_size"]}
    if "dynamic_batching" in completed:
        config.setdefault("dynamic_batching", {})
    return replace(source, config=complete_fields(config))


def streams_text(config: RawConfig) -> bool:
    """Whether its answers are streams of text: a language model's, or those of a graph that passes them on."""
    inputs, outputs = ({tensor["name"] for tensor in config[side]} for side in ("input", "output"))
    return is_language_model(config) or ("text_input" in inputs and "text_output" in outputs)


def is_language_model(config: RawConfig) -> bool:
    return bool(config["backend"] == LANGUAGE_MODEL_BACKEND)


def is_composed(config: RawConfig) -> bool:
    """Whether it only asks others: it has no instances and no batches of its own."""
    return config["backend"] in (PIPELINE_BACKEND, "ensemble") or "ensemble_scheduling" in config
