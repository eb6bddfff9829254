"""What flags and commands of vLLM, SGLang, TensorRT-LLM and llama.cpp are called here, or why there are none: for the
messages about command lines that were written for them. Flags that mean the same there and here are no part of it."""

from collections.abc import Mapping

from ..engine.vllm.arguments import NOT_SERVED

_NOT_SERVED = "not served: "
_NO_EFFECT = "leave it out: "

_MODEL = "the argument without a flag"
_LENGTH = "--max-model-len, of one text"
_ROWS = "--max-num-seqs"
_STEP = "--max-num-batched-tokens"
_ENCODER = "--backend encoder, for vectors and scores; nothing for text"
_CONFIG = f"{_NOT_SERVED}{NOT_SERVED['hf_overrides']}"
_REQUEST = "a field of requests"
_FORMS = f"{_NO_EFFECT}one library holds answers to a form, llguidance"
_COMPILED = f"{_NO_EFFECT}nothing is compiled"
_GRAPHS = f"{_NO_EFFECT}steps are captured as CUDA graphs when they first come; --enforce-eager turns that off"
_OWN_CODE = f"{_NOT_SERVED}packages bring code of their own by entry points"
_SCHEDULED = f"{_NO_EFFECT}steps are scheduled by one rule"
_ALWAYS = f"{_NO_EFFECT}it is always so"
_MAPPED = f"{_NO_EFFECT}files are mapped while they are read"


def _by_name(names: Mapping[str, str]) -> Mapping[str, str]:
    """A table of `names`, which has what is here and, apart by blanks, the flags that mean it."""
    return {flag: ours for ours, flags in names.items() for flag in flags.split()}


_OF_VLLM = {
    f"{_NOT_SERVED}name a directory by --tokenizer": "--tokenizer-revision",
    "--tensor-parallel-size": "-tp",
    "--pipeline-parallel-size": "-pp",
    "--data-parallel-size": "-dp",
    "--enable-expert-parallel": "-ep",
    "--kv-cache-bytes": "--kv-cache-memory-bytes",
    "--kv-cache-host-bytes, in bytes": "--kv-offloading-size",
    "--kv-cache-blocks": "--num-gpu-blocks-override",
    "--ahead 1": "--async-scheduling",
    "the variable HF_TOKEN": "--hf-token",
    "--media-path": "--allowed-local-media-path",
    "--media-domains": "--allowed-media-domains",
    "--media-cache-bytes": "--mm-processor-cache-gb",
    "--max-lora-bytes: adapters are counted by what they take": "--max-cpu-loras",
    "--http-server-cert": "--ssl-certfile",
    "--http-server-key": "--ssl-keyfile",
    "--grpc-root-cert, for gRPC alone": "--ssl-ca-certs",
    f"{_NOT_SERVED}let the proxy take the prefix away": "--root-path",
    "--log-info, --log-warning, --log-error, --log-verbose": "--uvicorn-log-level",
    f"{_NO_EFFECT}--allowed-origins lets pages use all of them": "--allowed-methods",
    f"{_NO_EFFECT}--allowed-origins lets pages send all of them": "--allowed-headers",
    _ENCODER: "--task --runner --convert",
    _CONFIG: "--rope-scaling --rope-theta --disable-sliding-window",
    f"{_NOT_SERVED}change the checkpoint's modules.json": "--pooler-config",
    "--frontends": "--api-server-count",
    "--attention": "--attention-backend",
    "--distributed-executor-backend ray": "--worker-use-ray",
    "--limit-mm-per-prompt image=0,audio=0": "--language-model-only",
    "--load-on-demand with --model-idle-secs": "--enable-sleep-mode",
    f"{_NO_EFFECT}--reasoning-parser alone says it": "--enable-reasoning",
    f"{_NO_EFFECT}answers are the assistant's": "--response-role",
    f"{_NO_EFFECT}the template says what it takes": "--chat-template-content-format",
    _REQUEST: "--return-tokens-as-token-ids",
    f"{_REQUEST}, stream_options": "--enable-force-include-usage",
    f"{_NOT_SERVED}prompts are texts or token ids": "--enable-prompt-embeds",
    f"{_NOT_SERVED}a model has its tokenizer": "--skip-tokenizer-init",
    _OWN_CODE: "--tool-parser-plugin --reasoning-parser-plugin --logits-processors --middleware",
    f"{_NOT_SERVED}a proxy may listen on a socket of files": "--uds",
    _FORMS: "--guided-decoding-backend --structured-outputs-config",
    _COMPILED: "--optimization-level -cc -O",
    _MAPPED: "--safetensors-load-strategy --model-loader-extra-config --use-tqdm-on-load",
    f"{_NO_EFFECT}config.json says what computes it": "--model-impl --config-format",
    f"{_NO_EFFECT}log-probabilities are of the model's own distribution": "--logprobs-mode",
    _GRAPHS: "--max-seq-len-to-capture --cudagraph-capture-sizes",
    _SCHEDULED: "--num-scheduler-steps --max-num-partial-prefills --preemption-mode",
    f"{_NO_EFFECT}tokens merge where a reader is slow": "--stream-interval",
    f"{_NO_EFFECT}blocks are found by one hash": "--prefix-caching-hash-algo",
    _ALWAYS: "--enable-server-load-tracking --enable-tokenizer-info-endpoint --use-v2-block-manager",
    f"{_NO_EFFECT}there are none without --api-docs": "--disable-fastapi-docs",
}
_OF_SGLANG = {
    _MODEL: "--model-path",
    "--tokenizer": "--tokenizer-path",
    _LENGTH: "--context-length",
    "--gpu-memory-utilization": "--mem-fraction-static",
    _ROWS: "--max-running-requests",
    "--kv-cache-blocks, each of --block-size tokens": "--max-total-tokens",
    _STEP: "--chunked-prefill-size --max-prefill-tokens",
    "--block-size": "--page-size",
    "--tensor-parallel-size": "--tp --tp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--data-parallel-size": "--dp-size",
    "--no-prefix-caching": "--disable-radix-cache",
    "--enforce-eager": "--disable-cuda-graph",
    "--lora-modules": "--lora-paths",
    "--speculative-config": "--speculative-algorithm",
    _ENCODER: "--is-embedding",
    _FORMS: "--grammar-backend",
    _ALWAYS: "--enable-metrics",
}
_OF_TENSORRT_LLM = {
    _ROWS: "--max-batch-size",
    _LENGTH: "--max-seq-len",
    _STEP: "--max-num-tokens",
    "--kv-cache-memory-fraction": "--kv-cache-free-gpu-memory-fraction",
    "--config, with flags from here": "--extra-llm-api-options",
}
_OF_LLAMA_CPP = {
    _MODEL: "-m",
    f"{_MODEL}, owner/name:Q4_K_M": "-hf --hf-repo",
    "--model-repository, into which charonia import puts models": "--models-dir",
    "--served-model-name": "-a --alias",
    _LENGTH: "-c --ctx-size",
    _ROWS: "-np --parallel",
    _STEP: "-b --batch-size -ub --ubatch-size",
    "--threads": "-t -tb --threads-batch",
    "--device: a model computes on one kind": "-ngl --gpu-layers --n-gpu-layers",
    "--kv-cache-dtype": "-ctk -ctv --cache-type-k --cache-type-v",
    "--speculative-config": "-md --model-draft",
    "--lora-modules": "--lora",
    "--chat-template": "--chat-template-file",
    "--reasoning-parser": "--reasoning-format",
    "--http-server-cert": "--ssl-cert-file",
    "--http-server-key": "--ssl-key-file",
    "--default-request-timeout": "--timeout",
    _ENCODER: "--embedding --embeddings --reranking",
    f"{_NOT_SERVED}of GGUF the language part is": "--mmproj",
    f"{_REQUEST}, max_tokens": "-n --n-predict",
    f"{_REQUEST}, temperature": "--temp",
    _ALWAYS: "-fa --flash-attn -cb --cont-batching --jinja --metrics",
    _MAPPED: "--mlock --no-mmap",
    f"{_NO_EFFECT}there is no page without --console": "--no-webui",
}

VLLM_FLAGS: Mapping[str, str] = {
    **{f"--{name.replace('_', '-')}": _NOT_SERVED + reason for name, reason in NOT_SERVED.items()},
    **_by_name(_OF_VLLM),
}
"""By vLLM's name: the name here, or the reason why there is none."""

OTHER_SERVERS: Mapping[str, Mapping[str, str]] = {
    "vLLM": VLLM_FLAGS,
    "SGLang": _by_name(_OF_SGLANG),
    "TensorRT-LLM": _by_name(_OF_TENSORRT_LLM),
    "llama.cpp": _by_name(_OF_LLAMA_CPP),
}
"""Their flags by their names; where two have one of the same name the first counts."""

OTHER_COMMANDS: Mapping[str, str] = {
    "bench": "python -m charonia.bench.serve",
    "benchmark": "python -m charonia.bench.serve",
    "run-batch": "POST /v1/batches of a server",
    "collect-env": "charonia doctor",
    "run": "charonia serve",
    "launch": "charonia serve",
    "pull": "hf download",
    "chat": "charonia serve --console, a page in the browser",
    "complete": "POST /v1/completions of a server",
}
"""Commands of theirs, and what is there for each."""


def other_server_of(flag: str) -> tuple[str, str] | None:
    """The server that has this flag, and what it is called here; None if no other server's flag is known by it."""
    name = flag.replace("_", "-")
    for server, flags in OTHER_SERVERS.items():
        if name in flags:
            return server, flags[name]
    return None


def flag_tables() -> str:
    """`OTHER_SERVERS` as tables in text."""
    tables = []
    for server, flags in OTHER_SERVERS.items():
        width = max(map(len, flags))
        rows = (f"  {flag:{width}}  {ours}" for flag, ours in sorted(flags.items(), key=lambda row: row[0].lstrip("-")))
        tables.append("\n".join([f"{server}'s flags that are called otherwise here:", *rows]))
    return "\n\n".join(tables)
