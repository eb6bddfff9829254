"""Which models to serve, under tritonserver's names. Free of what serves them: the command line reads it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryOptions:
    """Which models to serve."""

    model_repository: Annotated[
        tuple[Path, ...], Parameter(name=("--model-repository", "--model-store"), negative=())
    ] = ()
    """Directory of models; may be given several times."""
    served_model_name: str = ""
    """Name of a single checkpoint, instead of its directory's."""
    revision: str = ""
    """Branch, tag or commit of a hub id."""
    download_dir: Path | None = None
    """Where models of the hub are kept, in place of HF_HUB_CACHE."""
    backend: str = ""
    """What serves a single checkpoint, instead of what its files say: charonia, tensorrtllm or encoder."""
    model_control_mode: Literal["none", "poll", "explicit"] = "none"
    """Who changes what is served: nobody, the repository's files, or requests."""
    load_model: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Model to load at the start in mode explicit; may be given several times, * is all."""
    repository_poll_secs: Annotated[float, Parameter(validator=Number(gt=0))] = 15
    """Seconds between looks at the repository in mode poll."""
    model_config_name: str = ""
    """Name of the config file to use, in configs/ of each model that has it."""
    disable_auto_complete_config: Annotated[bool, Parameter(negative=())] = False
    """Take configs as they are written, instead of completing them from the models' files."""
    backend_config: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Parameter of a backend, as BACKEND,KEY=VALUE, or of all, as KEY=VALUE; may be given several times."""
    execution_timeout_secs: Annotated[float, Parameter(validator=Number(gte=0))] = 0
    """Seconds after which an execution of a classic model is ended, if it can be; 0 is never."""
    cache_config: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Keep answers of models whose configs have response_cache, as local,size=BYTES."""
    memory_limit: Annotated[int | None, Parameter(validator=Number(gt=0))] = None
    """Bytes of the host's memory that all models may hold together; without it, what is free."""
    gpu_memory_limit: Annotated[int | None, Parameter(validator=Number(gt=0))] = None
    """Bytes of each GPU's memory that all models may hold together; without it, what is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """How configs are read that are only to be checked."""

    model_config_name: str = ""
    """Name of the config file to use, in configs/ of each model that has it."""
    disable_auto_complete_config: Annotated[bool, Parameter(negative=())] = False
    """Take configs as they are written, instead of completing them from the models' files."""
    backend_config: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Parameter of a backend, as BACKEND,KEY=VALUE, or of all, as KEY=VALUE; may be given several times."""
