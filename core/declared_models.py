"""The models that a model says it asks: its config's parameter `models`, read without running its code."""

from collections.abc import Mapping
from dataclasses import dataclass

MODELS_PARAMETER = "models"

_ANY = "*"
_MAY_BE_MISSING = "?"


@dataclass(frozen=True, slots=True)
class DeclaredModels:
    """Names between commas. One with `?` behind it may be missing; `*` stands for whatever models there are."""

    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    any: bool = False

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> "DeclaredModels":
        names = {name.strip() for name in parameters.get(MODELS_PARAMETER, "").split(",")} - {"", _MAY_BE_MISSING}
        optional = frozenset(name.removesuffix(_MAY_BE_MISSING) for name in names if name.endswith(_MAY_BE_MISSING))
        required = frozenset(name for name in names if not name.endswith(_MAY_BE_MISSING)) - {_ANY}
        return cls(required, optional - required, _ANY in names)

    @property
    def names(self) -> frozenset[str]:
        return self.required | self.optional

    def allows(self, name: str) -> bool:
        return self.any or name in self.names
