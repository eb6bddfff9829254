"""Names of classes: the label files that a config's outputs name, one label a line."""

from pathlib import Path

from ..core.errors import InvalidArgument
from .config_io import ConfigMessage


def read_label_files(config: ConfigMessage, directory: Path) -> dict[str, tuple[str, ...]]:
    """Labels by output, from the model's directory.

    Raises:
        InvalidArgument: a file cannot be read, or is outside the directory.
    """
    named = (output for output in config.output if output.label_filename)
    return {output.name: _read(output.name, path_within(directory, output.label_filename)) for output in named}


def path_within(directory: Path, path: str) -> Path:
    """A file that a config names.

    Raises:
        InvalidArgument: it would be outside the directory.
    """
    file = directory / path
    try:
        within = file.resolve().is_relative_to(directory.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # of a loop of links, or a name that no file can have
        raise InvalidArgument(f"cannot read {path!r}: {error}", field=path) from None
    if not within:
        raise InvalidArgument(f"'{path}' must stay within the model directory", field=path)
    return file


def _read(output: str, file: Path) -> tuple[str, ...]:
    try:
        return tuple(file.read_text().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read the labels of output '{output}' from {file}: {error}"
        raise InvalidArgument(message, field=f"output.{output}.label_filename") from None
