"""`charonia serve`: its flags, from a command line, the environment and a file, and what is set up around a server.

Heavy imports wait until a server is started: other commands read its flags.
"""

import logging
import os
from typing import Annotated

from cyclopts import App, Parameter

from .. import __version__
from ..core.errors import InvalidArgument
from .flag_sources import PREFIX, command_flags, complete_arguments, strays
from .foreign_flags import TritonFlags, VllmFlags
from .options import ServeOptions

log = logging.getLogger(__name__)

_EXAMPLES = """Examples:

    charonia serve ./my-checkpoint                 a Hugging Face directory

    charonia serve owner/name --revision main      a model of the hub

    charonia serve --model-repository ./models     a Triton model repository

    charonia serve --config serve.yaml             flags of a file; CHARONIA_HTTP_PORT=9000 sets one, too

    charonia flags                                 flags of vLLM and tritonserver
"""

serve_command = App(name="serve", help_prologue=_EXAMPLES, config=complete_arguments)


@serve_command.default
def serve(
    model: str | None = None,
    /,
    *,
    options: Annotated[ServeOptions, Parameter("*")] = ServeOptions(),  # noqa: B008
    triton: Annotated[TritonFlags, Parameter("*", show=False)] = TritonFlags(),  # noqa: B008
    vllm: Annotated[VllmFlags, Parameter("*", show=False)] = VllmFlags(),  # noqa: B008
) -> int:
    """Serve models until SIGTERM or SIGINT; a second one forces.

    Parameters
    ----------
    model
        A checkpoint directory, a file in GGUF, a hub id, or a model repository.
    """
    import uvloop

    from ..telemetry.logging_setup import configured_logging
    from ..telemetry.tracing import open_tracer, otlp_endpoint
    from .plan import plan_server
    from .serve import run

    options = vllm.completed(triton.completed(options))
    if model and vllm.model not in ("", model):
        raise InvalidArgument(f"two models to serve: '{model}', and --model '{vllm.model}'")
    if options.repository.download_dir is not None:  # read by the hub's library, here and in child processes
        os.environ["HF_HUB_CACHE"] = str(options.repository.download_dir)
    with configured_logging(options.server.log_settings, options.server.log_requests) as logs:
        triton.check()
        vllm.check()
        _warn_of_strays()
        plan = plan_server(model or vllm.model or None, options, logs)
        spans = plan.shared.traces.settings().spans
        endpoint = otlp_endpoint(options.server.otlp_traces_endpoint, os.environ, spans)
        with open_tracer(endpoint, __version__, spans) as tracer:
            return uvloop.run(run(plan, tracer))


def _warn_of_strays() -> None:
    if any(name.startswith(PREFIX) for name in os.environ):
        for stray in strays(command_flags(serve_command.assemble_argument_collection()), os.environ):
            log.warning("%s", stray)
