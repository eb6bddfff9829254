"""/v2/models/{model}/graph: the models that answer a model's requests, as data or as a picture."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...api.metadata import model_stats_json
from ...api.triton.endpoints import model_and_version
from ...core.errors import CharoniaError, InvalidArgument
from ...core.gateway import Administration
from .graph_formats import GRAPH_FORMATS
from .model_graph import GraphModel, graph_of_models, node_times

_PATHS = "/v2/models/{model}/graph", "/v2/models/{model}/versions/{version:int}/graph"


class GraphRoutes:
    """The routes and their handler."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    def routes(self) -> list[Route]:
        return [Route(path, self.graph, methods=["GET"]) for path in _PATHS]

    async def graph(self, request: Request) -> Response:
        """The graph of a model. Query: `format`, `json` if it is not there, and `statistics`, 1 for times."""
        name, version = model_and_version(request)
        self._administration.model_config(name, version)
        form = request.query_params.get("format", "json")
        timed = request.query_params.get("statistics", "0")
        if form not in GRAPH_FORMATS:
            known = ", ".join(GRAPH_FORMATS)
            raise InvalidArgument(f"unknown format '{form}' of a graph; there are {known}", field="format")
        if timed not in ("0", "1"):
            raise InvalidArgument(f"statistics must be 0 or 1, got '{timed}'", field="statistics")
        written = GRAPH_FORMATS[form]

        def find(name: str, version: str) -> GraphModel | None:
            try:
                config = self._administration.model_config(name, version)
            except CharoniaError:
                return None
            counted = self._administration.model_statistics(name, config.version) if timed == "1" else ()
            times = node_times(model_stats_json(counted[0])["inference_stats"]) if counted else None
            return GraphModel(config.version, config.raw, times)

        graph = graph_of_models([name], find, version)
        return Response(written.write(graph), media_type=written.media_type)
