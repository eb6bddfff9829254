"""The commands and their flags.

Heavy imports wait until they are needed: `charonia --help` is for people.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Group, Parameter

from .. import __version__
from ..core.errors import CharoniaError, InvalidArgument
from ..engine.options import EngineOptions
from .cloud_options import CloudOptions
from .grpc_options import GrpcOptions
from .http_options import HttpOptions
from .key_options import KeyOptions
from .repository_options import CheckOptions, RepositoryOptions
from .server_options import ServerOptions
from .triton_flags import TritonFlags
from .vllm_flags import format_usage_error, vllm_flag_table

app = App(
    name="charonia",
    version=__version__,
    help="A streaming, LLM-centric inference server.",
    result_action="return_value",  # main has more to do before it ends with that status
    error_formatter=format_usage_error,
)


def _group(name: str, place: int) -> Parameter:
    """The flags of one class, under a heading of their own in the help."""
    return Parameter("*", group=Group(name, sort_key=place))


_EXAMPLES = """Examples:

    charonia serve ./my-checkpoint                 a Hugging Face directory

    charonia serve owner/name --revision main      a model of the hub

    charonia serve --model-repository ./models     a Triton model repository

    charonia flags                                 flags of vLLM and tritonserver
"""


@app.command(help_prologue=_EXAMPLES)
def serve(
    model: str | None = None,
    /,
    *,
    repository: Annotated[RepositoryOptions, _group("Models", 1)] = RepositoryOptions(),  # noqa: B008
    engine: Annotated[EngineOptions, _group("Language models", 2)] = EngineOptions(),  # noqa: B008
    server: Annotated[ServerOptions, _group("Server", 3)] = ServerOptions(),  # noqa: B008
    http: Annotated[HttpOptions, _group("HTTP", 4)] = HttpOptions(),  # noqa: B008
    access: Annotated[KeyOptions, _group("Keys", 5)] = KeyOptions(),  # noqa: B008
    grpc: Annotated[GrpcOptions, _group("gRPC", 6)] = GrpcOptions(),  # noqa: B008
    cloud: Annotated[CloudOptions, _group("Clouds", 7)] = CloudOptions(),  # noqa: B008
    triton: Annotated[TritonFlags, Parameter("*", show=False)] = TritonFlags(),  # noqa: B008
) -> int:
    """Serve models until SIGTERM or SIGINT; a second one forces.

    Parameters
    ----------
    model
        A checkpoint directory, a hub id, or a model repository.
    """
    import uvloop

    from ..telemetry.logging_setup import configured_logging
    from ..telemetry.metric_families import parse_metrics_config
    from ..telemetry.tracing import open_tracer, otlp_endpoint
    from .endpoint_settings import endpoint_settings
    from .plan import (
        ServePlan,
        check_triton_flags,
        selection_from_flags,
        shared_state,
        warn_of_unprotected_control,
    )
    from .serve import run

    if repository.download_dir is not None:
        os.environ["HF_HUB_CACHE"] = str(
            repository.download_dir
        )  # read by the hub's library, here and in what we start
    server, repository = triton.renamed.apply_to_server(server), triton.renamed.apply_to_repository(repository)
    try:
        with configured_logging(server.log_settings) as logs:
            check_triton_flags(triton)
            doors, metrics = (
                endpoint_settings(server, http, access, grpc, cloud),
                parse_metrics_config(server.metrics_config),
            )
            warn_of_unprotected_control(repository, server, grpc, doors)
            chosen = selection_from_flags(model, repository, engine, metrics)
            plan = ServePlan(doors, chosen, shared_state(server, logs), server, grpc, metrics)
            spans = plan.shared.traces.settings().spans
            endpoint = otlp_endpoint(server.otlp_traces_endpoint, os.environ, spans)
            with open_tracer(endpoint, __version__, spans) as tracer:
                return uvloop.run(run(plan, tracer))
    except CharoniaError as error:
        return _failed(error)


@app.command
def check(
    repository: str | None = None,
    /,
    *,
    tensorrt_llm: Annotated[bool, Parameter(negative=())] = False,
    options: Annotated[CheckOptions, Parameter("*")] = CheckOptions(),  # noqa: B008
) -> int:
    """Say what is wrong with a model repository, without serving it; the status is 1 if a model would not load.

    Parameters
    ----------
    repository
        Directory of models; with --tensorrt-llm, a checkpoint to generate with.
    tensorrt_llm
        Instead, hold the installed TensorRT-LLM against what its adapter expects.
    """
    if tensorrt_llm:
        from ..engine.trtllm.check import report as report_package

        return report_package(repository)
    from .repository_check import print_check_report

    try:
        if repository is None:
            raise InvalidArgument("nothing to check: name a model repository")
        return print_check_report(Path(repository), options)
    except CharoniaError as error:
        return _failed(error)


@app.command
def flags(
    *,
    triton: Annotated[TritonFlags, Parameter("*")] = TritonFlags(),  # noqa: B008
) -> int:
    """Say what becomes of tritonserver's flags that `serve --help` leaves out, and what vLLM's are called."""
    app.help_print(["flags"])
    print(vllm_flag_table())
    return 0


def _failed(error: CharoniaError) -> int:
    """Print the error; the status to exit with."""
    print(f"charonia: {error.message}", file=sys.stderr)
    return 1
