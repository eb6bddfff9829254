"""Models made of other models of the server: ensembles, and pipelines, whose code imports what it needs from here."""

from ..core.errors import CharoniaError, Internal, InvalidArgument, NotFound, QueueFull, RequestTimeout, Unavailable
from .lookup import AskedModel, Lookup, ModelStream
from .named_tensors import NamedTensors

__all__ = [
    "AskedModel",
    "CharoniaError",
    "Internal",
    "InvalidArgument",
    "Lookup",
    "ModelStream",
    "NamedTensors",
    "NotFound",
    "QueueFull",
    "RequestTimeout",
    "Unavailable",
]
