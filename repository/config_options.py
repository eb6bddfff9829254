"""The flags of commands that read and complete configs. Free of any server: the command line reads them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOptions:
    """Flags for reading and completing configs."""

    model_config_name: str = ""
    """Name of the config file to use, in configs/ of each model that has it."""
    disable_auto_complete_config: Annotated[bool, Parameter(negative=())] = False
    """Take configs as they are written, instead of completing them from the models' files."""
    backend_config: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Parameter of a backend, as BACKEND,KEY=VALUE, or of all, as KEY=VALUE; may be given several times."""
    backend_directory: Path = Path("/opt/tritonserver/backends")
    """Directory of backends written in Python: folders with a model.py."""
