"""vLLM's flags by the names that they have here, and the messages for unknown flags.

Where a flag means the same it has vLLM's name and is an option; those here are not. tritonserver's flags are all
accepted (`cli/triton_flags.py`).
"""

from collections.abc import Mapping

from cyclopts import CycloptsPanel
from cyclopts.exceptions import CycloptsError, UnknownOptionError

from ..core.errors import did_you_mean
from ..engine.vllm.arguments import NOT_SERVED, WITHOUT_EFFECT

_NO_EFFECT = "leave it out: "
_NOT_SERVED = "not served: "


def _flags(arguments: Mapping[str, str], kind: str) -> dict[str, str]:
    return {f"--{name.replace('_', '-')}": kind + reason for name, reason in arguments.items()}


VLLM_FLAGS: Mapping[str, str] = {
    **_flags({name: why for name, why in WITHOUT_EFFECT.items() if name != "enable_auto_tool_choice"}, _NO_EFFECT),
    **_flags(NOT_SERVED, _NOT_SERVED),
    "--host": "--http-address, --grpc-address and --metrics-address",
    "--port": "--http-port; gRPC has --grpc-port, metrics --metrics-port",
    "--model": "the first argument: charonia serve MODEL",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "--gpu-memory-utilization": "--kv-cache-memory-fraction, of what weights leave free; --gpu-memory-limit, in bytes",
    "--kv-cache-memory-bytes": "--kv-cache-bytes",
    "--num-gpu-blocks-override": "--kv-cache-blocks",
    "--enable-prefix-caching": "--prefix-caching, which is on by default",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--async-scheduling": "--ahead 1",
    "--hf-token": "the variable HF_TOKEN",
    "--max-cpu-loras": "--max-lora-bytes: adapters are counted by what they take",
    "--lora-dtype": f"{_NO_EFFECT}adapters are computed with in the model's type",
    "--fully-sharded-loras": f"{_NO_EFFECT}ranks hold their slices of an adapter",
    "--ssl-certfile": "--http-server-cert",
    "--ssl-keyfile": "--http-server-key",
    "--ssl-ca-certs": "--grpc-root-cert, for gRPC alone",
    "--root-path": f"{_NOT_SERVED}let the proxy take the prefix away",
    "--uvicorn-log-level": "--log-info, --log-warning, --log-error, --log-verbose",
    "--enable-log-requests": "--log-info, which is on by default",
    "--disable-log-requests": "--log-info=false",
    "--no-enable-log-requests": "--log-info=false",
    "--disable-uvicorn-access-log": f"{_NO_EFFECT}they come with --log-verbose alone",
    "--enable-request-id-headers": f"{_NO_EFFECT}every answer has x-request-id",
    "--allowed-methods": f"{_NO_EFFECT}--allowed-origins lets pages use all of them",
    "--allowed-headers": f"{_NO_EFFECT}--allowed-origins lets pages send all of them",
}
"""By vLLM's name: the name here, or the reason why there is none."""


def format_usage_error(error: CycloptsError) -> object:
    """The panel that is printed for a command line that cannot be read."""
    if not isinstance(error, UnknownOptionError):
        return CycloptsPanel(error)
    flag, _, _ = (error.token.keyword or error.token.value).partition("=")
    if flag in VLLM_FLAGS:
        return CycloptsPanel(f"{flag} is vLLM's; here: {VLLM_FLAGS[flag]}")
    known = [name for argument in error.argument_collection for name in argument.names]
    return CycloptsPanel(f"Unknown option: {flag}{did_you_mean(flag.replace('_', '-'), [*known, *VLLM_FLAGS])}")


def vllm_flag_table() -> str:
    """`VLLM_FLAGS` as a table in text."""
    width = max(map(len, VLLM_FLAGS))
    flags = sorted(VLLM_FLAGS.items(), key=lambda row: row[0].lstrip("-"))
    return "\n".join(
        ["vLLM's flags that are called otherwise here:", *(f"  {flag:{width}}  {here}" for flag, here in flags)]
    )
