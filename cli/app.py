"""The commands and their flags: ours, and those of installed packages.

Heavy imports wait until they are needed: `charonia --help` is for people.
"""

import ast
import logging
import sys
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from .. import __version__
from ..core.errors import CharoniaError, InvalidArgument, Unsupported
from ..core.extensions import installed_extensions
from ..repository.config_options import ConfigOptions
from .foreign_flags import TritonFlags, VllmFlags, format_usage_error
from .other_servers import flag_tables
from .serve_command import serve_command

log = logging.getLogger(__name__)


class CommandLine(App):
    """All commands. An error of any of them that is meant for people is a line, and the status 1."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        try:
            return super().__call__(*args, **options)
        except CharoniaError as error:
            print(f"charonia: {error.message}", file=sys.stderr)
            return 1


app = CommandLine(
    name="charonia",
    version=__version__,
    help="A streaming, LLM-centric inference server.",
    result_action="return_value",  # main has more to do before it ends with that status
    error_formatter=format_usage_error,
)
app.command(serve_command)


@app.command
def check(
    repository: str | None = None,
    /,
    *,
    model_repository: Annotated[tuple[str, ...], Parameter(name=("--model-repository", "--model-store"))] = (),
    model_cache_dir: Path | None = None,
    tensorrt_llm: Annotated[bool, Parameter(negative=())] = False,
    options: Annotated[ConfigOptions, Parameter("*")] = ConfigOptions(),  # noqa: B008
) -> int:
    """Say what is wrong with a model repository or a checkpoint, without serving it; the status is 1 if a model would
    not load. Of a checkpoint it tells the format, memory, and the bound of this machine's speed.

    Parameters
    ----------
    repository
        Directory of models, or s3://, gs:// or as:// and a path, a checkpoint, or a file in GGUF; with --tensorrt-llm,
        a checkpoint to generate with.
    model_repository
        The same, as `serve` has it: several are checked as one server would have them.
    model_cache_dir
        Where models of object storage are kept; without it, charonia/models in the user's cache.
    tensorrt_llm
        Instead, hold the installed TensorRT-LLM against what its adapter expects.
    """
    if tensorrt_llm:
        from ..repository.backend_registry import text_backend

        backend = text_backend("tensorrtllm")
        if backend is None or backend.check_library is None:
            raise Unsupported("there is no backend 'tensorrtllm' in this installation")
        return backend.check_library(repository)
    from .repository_check import print_check_report

    return print_check_report([*([repository] if repository else ()), *model_repository], options, model_cache_dir)


@app.command
def doctor(*, config: Path | None = None, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Say what of this machine would slow or stop a server, and how to mend it; the status is 1 if it would not serve.

    Parameters
    ----------
    config
        YAML file of flags that `serve` is to have; those that the environment sets are told, too.
    json
        Print a list of objects with `subject`, `verdict` (good, slow, wrong), `text` and `mend`.
    """
    from .doctor import print_findings

    return print_findings(json, config)


@app.command(name="import")
def import_(
    source: str,
    /,
    *,
    into: Path = Path("models"),
    name: str = "",
    copy: Annotated[bool, Parameter(negative=())] = False,
    trust_pickle: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Make a model of a repository: from a checkpoint, an encoder, a model's file or SavedModel, or a pickled forest.

    Parameters
    ----------
    source
        A Hugging Face or sentence-transformers directory, a SavedModel's, a hub id in the Hugging Face cache, or a file
        that ends with .onnx, .xml, .pt or .pt2, or is a forest's.
    into
        Model repository; made if it is not there.
    name
        The model's name, instead of the source's.
    copy
        Copy the files. Otherwise they are linked: nothing is stored twice, but the repository cannot be moved without
        them.
    trust_pickle
        Run the pickle of a forest, which may do anything, and make a checkpoint of it.
    """
    from .model_import import import_model

    import_model(source, into, name, copy, trust_pickle)
    return 0


@app.command
def run_model(
    directory: Path,
    /,
    *,
    inputs: Annotated[tuple[str, ...], Parameter(name="--input", negative=())] = (),
    parameters: Annotated[tuple[str, ...], Parameter(name="--param", negative=())] = (),
    load_model: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    options: Annotated[ConfigOptions, Parameter("*")] = ConfigOptions(),  # noqa: B008
) -> int:
    """Ask one model of a repository once, without a server; its responses are lines of JSON.

    Parameters
    ----------
    directory
        The model's directory.
    inputs
        Input as NAME=JSON, NAME=@FILE.npy or, for strings, NAME=TEXT; may be given several times.
    parameters
        Parameter of the request as KEY=VALUE; may be given several times.
    load_model
        Model beside it that its code asks; may be given several times. The steps of an ensemble are loaded anyway.
    """
    from .model_run import ModelRequest, log_what_models_print, print_responses

    log_what_models_print()
    print_responses(directory, ModelRequest(inputs, parameters, load_model), options)
    return 0


@app.command
def explain(
    before: str | None = None,
    after: Path | None = None,
    /,
    *,
    url: str = "",
    seconds: Annotated[float | None, Parameter(validator=Number(gte=0, lte=3600))] = None,
    header: str = "",
    model: str = "",
    machine: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Say what limits each model of a server, with the evidence and the flag to turn, the worst first.

    Parameters
    ----------
    before
        A saved scrape of the server's metrics; without a second one it is of the time since the server's start. Or a
        server, as --url has it.
    after
        A later scrape of the same server.
    url
        A server to look at instead, as http://HOST:PORT of its metrics or of its HTTP port.
    seconds
        Time between two looks at it, 5 if unset; with 0 there is one, of the time since its start.
    header
        A header that the server wants, as NAME: VALUE.
    model
        One model, instead of all.
    machine
        The file that `charonia calibrate` wrote of the language model: it tells memory bandwidth from arithmetic.
    json
        Print a list of reports, one for each version of a model.
    """
    from .explain import print_reports, read_saved, watch_server

    server = before if before is not None and "://" in before and not url else ""
    files = [Path(file) for file in (before, after) if file is not None and file != server]
    url = url or server
    if bool(files) == bool(url):
        raise InvalidArgument("nothing to explain: name saved scrapes, or a server by --url")
    if files and (header or seconds is not None):
        raise InvalidArgument("--header and --seconds are for a server: name it by --url")
    interval = read_saved(files) if files else watch_server(url, header, 5.0 if seconds is None else seconds)
    print_reports(interval, model, machine, json)
    return 0


@app.command
def cache(
    directory: Path,
    /,
    *,
    clear: Annotated[bool, Parameter(negative=())] = False,
    verify: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """List the packed weights that --cache-dir keeps.

    Parameters
    ----------
    directory
        What --cache-dir names.
    clear
        Then remove them; engines that use some keep theirs until they end.
    verify
        Read them, and say which are not what was written; the status is 1 if any is.
    """
    from .packed_weights import print_packed_weights

    return print_packed_weights(directory, clear=clear, verify=verify)


@app.command
def flags(
    *,
    triton: Annotated[TritonFlags, Parameter("*")] = TritonFlags(),  # noqa: B008
    vllm: Annotated[VllmFlags, Parameter("*")] = VllmFlags(),  # noqa: B008
) -> int:
    """Say what becomes of flags of tritonserver and vLLM that `serve --help` leaves out, and what other servers' are
    called."""
    app.help_print(["flags"])
    print(flag_tables())
    return 0


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print the script by which a shell completes commands and flags, as in: source <(charonia completion bash)

    Parameters
    ----------
    shell
        For fish: charonia completion fish | source
    """
    print(app.generate_completion(shell=shell))
    return 0


def add_installed_commands() -> None:
    """Add the functions of `charonia.commands`, each imported when it is called. They have annotations as the commands
    here, return the status, and may raise `CharoniaError`."""
    for name, entry in installed_extensions("charonia.commands").items():
        if name in app:
            log.warning("the command '%s' of %s is not added: the server has one of that name", name, entry.value)
        else:
            app.command(f"{entry.module}:{entry.attr}", name=name, help=_docstring(entry))


def _docstring(entry: EntryPoint) -> str | None:
    """The docstring of a function, read off the source: `charonia --help` is not to import every command."""
    spec = find_spec(entry.module)
    source = getattr(spec and spec.loader, "get_source", lambda _: None)(entry.module)
    for node in ast.parse(source or "").body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr:
            return ast.get_docstring(node)
    return None


add_installed_commands()
