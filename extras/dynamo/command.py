"""`charonia dynamo`: one checkpoint, served as a worker of Dynamo."""

from typing import Annotated

from cyclopts import Parameter

from ...core.errors import Unsupported
from ...engine.options import EngineOptions
from .tokens import Role


def dynamo(
    model: str,
    /,
    *runtime: Annotated[str, Parameter(allow_leading_hyphen=True)],
    served_model_name: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = (),
    lora_modules: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = (),
    disaggregation_mode: Role = "agg",
    engine: Annotated[EngineOptions, Parameter("*")] = EngineOptions(),  # noqa: B008
) -> int:
    """Serve one checkpoint as a worker of NVIDIA Dynamo, behind its frontend: no ports of its own. Needs ai-dynamo.

    Parameters
    ----------
    model
        A checkpoint's directory, or a hub id. It comes first.
    runtime
        Flags of Dynamo's workers, or its DYN_ variables: --namespace, --endpoint, --discovery-backend, --request-plane,
        --event-plane, --dyn-tool-call-parser, --dyn-reasoning-parser, --custom-jinja-template and others.
    served_model_name
        Names of the model, instead of its directory's: several one after the other.
    lora_modules
        Adapters, with --enable-lora, as NAME=DIRECTORY or as vLLM's JSON; several one after the other.
    disaggregation_mode
        What the worker does: all (agg), or with --kv-transfer-config prompts alone (prefill), or answers (decode).
    """
    try:
        from .backend import serve_worker
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "dynamo":
            raise
        raise Unsupported("this needs the package ai-dynamo, which is not installed: pip install ai-dynamo") from None
    options = engine.given() | {"served_model_name": served_model_name, "lora_modules": lora_modules}
    serve_worker(model, options, disaggregation_mode, runtime)
    return 0
