"""`charonia import`: writes the folder of a model into a repository as planned, judges it as `charonia check` does, and
says how to try it.
"""

import os
import shlex
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from ..core.errors import AlreadyExists, CharoniaError, InvalidArgument
from ..repository.backend_registry import LANGUAGE_MODEL_BACKEND
from ..repository.catalog import RepositoryCatalog
from ..repository.config_options import ConfigOptions
from ..repository.model_source import is_checkpoint
from .curl_line import curl_line
from .import_conversion import convert_saved_model, is_saved_model, unpickle_forest
from .import_plan import PICKLES, ImportPlan, check_model_name, locate_source, plan_import
from .repository_check import CheckedModel, model_checker


def import_model(source: str, repository: Path, name: str, copied: bool, trust_pickle: bool = False) -> None:
    """Make a folder in the repository for what `source` names, check it, and say what was found out and how to try it.
    `trust_pickle`: a pickle may run.

    Raises:
        CharoniaError: it cannot be served, or not be written; nothing is left behind.
    """
    try:
        path = locate_source(source)
        if not (is_saved_model(path) or (trust_pickle and path.suffix in PICKLES)):
            _import(plan_import(path, name), repository, copied)
            return
        with tempfile.TemporaryDirectory(prefix="charonia-import-") as made:
            plan = convert_saved_model(path, Path(made)) if is_saved_model(path) else unpickle_forest(path, Path(made))
            _import(replace(plan, name=check_model_name(name)) if name else plan, repository, copied=True)
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
