"""The file of a Python model: its class, and what that makes of a config."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from .backend_utils import ModelConfig
from .messages import CompleteConfig


def load_class(model_file: str, paths: list[str]) -> Any:
    """The class `TritonPythonModel` of a file. A file in a version's directory is imported as a module of a package, so
    that its relative imports work."""
    sys.path.extend(path for path in paths if path not in sys.path)
    path = Path(model_file)
    if path.parent.name.isdecimal():
        module = importlib.import_module(f"{path.parent.name}.{path.stem}")
    else:
        spec = importlib.util.spec_from_file_location(path.stem, model_file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    if not hasattr(module, "TritonPythonModel"):
        raise AttributeError(f"module '{model_file}' has no class 'TritonPythonModel'")
    return module.TritonPythonModel


def complete_config(message: CompleteConfig) -> str:
    """The config, as JSON, that the model makes of the one in the message."""
    config = ModelConfig(json.loads(message.config))
    model_class = load_class(message.model_file, message.paths)
    if hasattr(model_class, "auto_complete_config"):
        completed = model_class.auto_complete_config(config)
        if completed is not None and not isinstance(completed, ModelConfig):
            raise TypeError(f"auto_complete_config must return a ModelConfig, not '{type(completed).__name__}'")
        config = config if completed is None else completed
    return json.dumps(config.as_dict())
