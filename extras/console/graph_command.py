"""`charonia graph`: the graphs of a repository's models, or of those that a server serves, as a picture or a text."""

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from cyclopts import Parameter

from ...api.server_client import check_url, fetch, parse_header
from ...core.backends import ignore_progress
from ...core.errors import CharoniaError, InvalidArgument, NotFound, Unavailable
from ...repository.builder import ModelBuilder, parse_backend_config, with_config_defaults
from ...repository.catalog import RepositoryCatalog
from ...repository.config_options import ConfigOptions
from ...repository.gateway import InProcessGateway
from ...repository.memory_budget import DeviceMemory, MemoryBudget
from ...telemetry.shared_state import ModelServices
from .graph_formats import GRAPH_FORMATS
from .model_graph import GraphModel, graph_of_models, node_times, roots_of


def graph(
    repository: Path | None = None,
    /,
    *,
    model: str = "",
    format: Literal["mermaid", "svg", "json"] = "mermaid",
    url: str = "",
    header: str = "",
    statistics: Annotated[bool, Parameter(negative=())] = False,
    options: Annotated[ConfigOptions, Parameter("*")] = ConfigOptions(),  # noqa: B008
) -> int:
    """Draw how models ask each other, and the tensors between them.

    Parameters
    ----------
    repository
        Directory of models; nothing of it is served.
    model
        One model, instead of all.
    format
        A text for Mermaid, a picture, or data.
    url
        A server whose models to draw, instead of a repository's.
    header
        A header that the server wants, as NAME: VALUE.
    statistics
        Say where the server's time went.
    """
    if (repository is None) == (not url):
        raise InvalidArgument("nothing to draw: name a model repository, or a server by --url")
    if repository is not None and (header or statistics):
        raise InvalidArgument("--header and --statistics are for a server: name it by --url")
    models = read_server(url, header, statistics) if repository is None else read_repository(repository, options)
    print_graph(models, model, format)
    return 0


def print_graph(models: Mapping[str, GraphModel], model: str, form: str) -> None:
    """Print the graph of a model, or of all. Raises `NotFound` if there is no such model."""
    if model and model not in models:
        raise NotFound(f"there is no model '{model}' to draw, only {', '.join(sorted(models)) or 'none'}")
    names = [model] if model else roots_of({name: model_graph.config for name, model_graph in models.items()})
    print(GRAPH_FORMATS[form].write(graph_of_models(names, lambda name, version: models.get(name))), end="")


def read_repository(repository: Path, options: ConfigOptions) -> dict[str, GraphModel]:
    """The models of a repository, built as the check does; the error output says which are wrong, and left out.

    Raises `InvalidArgument` if the directory is missing, or an option is wrong.
    """
    memory = MemoryBudget(DeviceMemory(lambda: sys.maxsize))
    backends = parse_backend_config(options.backend_config, options.backend_directory)
    complete, directory = not options.disable_auto_complete_config, options.backend_directory
    builder = ModelBuilder(backends, complete, memory, backend_directory=directory)
    catalog = RepositoryCatalog([repository], config_name=options.model_config_name)
    models = {}
    with closing(asyncio.new_event_loop()) as loop:
        services = ModelServices(InProcessGateway(builder=builder), loop)
        for name in catalog.model_names():
            try:
                source = catalog.read(name)
                factory = builder.prepare(source, source.versions[-1], services)
                config = with_config_defaults(factory.build(ignore_progress).config, source.config)
                factory.reservation.release()
                models[name] = GraphModel(config.version, config.raw)
            except CharoniaError as error:
                print(f"{name}: WRONG: {error.message}", file=sys.stderr)
    return models


def read_server(url: str, header: str, statistics: bool) -> dict[str, GraphModel]:
    """The ready models of a server, in their latest versions. `header`: to send along, as NAME: VALUE.

    Raises:
        InvalidArgument: `url` or `header` has another form.
        Unavailable: the server does not answer, or refuses.
    """
    check_url(url)
    headers = parse_header(header)
    models: dict[str, GraphModel] = {}
    for entry in _fetch(url, "/v2/repository/index", headers, b"{}"):
        if entry.get("state") == "READY":
            path = f"/v2/models/{quote(entry['name'], safe='')}/versions/{entry['version']}"
            times = None
            if statistics:
                [stats] = _fetch(url, path + "/stats", headers)["model_stats"]
                times = node_times(stats["inference_stats"])
            described = GraphModel(entry["version"], _fetch(url, path + "/config", headers), times)
            known = models.get(entry["name"])
            if known is None or int(known.version) < int(entry["version"]):
                models[entry["name"]] = described
    return models


def _fetch(url: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> Any:
    try:
        return json.loads(fetch(url.rstrip("/") + path, headers, body))
    except ValueError as error:
        raise Unavailable(f"{url}{path}: {error}") from None
