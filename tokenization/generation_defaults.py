"""What a checkpoint says of how to generate from it: where to stop, and how to sample when nobody says.

Does not know how many tokens the model has: `within` is told.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument
from ..core.request import SamplingParams
from .checkpoint_files import read_json
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)


class GenerationDefaults(NamedTuple):
    """The model's own choices: `eos` ends a text; the others stand in for sampling parameters that are None."""

    eos: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def limited_to(self, vocab_size: int) -> "GenerationDefaults":
        """Without tokens that a model of so many can't write; who serves it is warned of them."""
        eos = tuple(token for token in self.eos if 0 <= token < vocab_size)
        strange = ", ".join(str(token) for token in self.eos if token not in eos)
        if strange:
            log.warning("eos_token_id %s is outside the vocabulary of %d tokens and ends no text", strange, vocab_size)
        return self._replace(eos=eos)


class ResolvedSampling(NamedTuple):
    """Sampling parameters with every default resolved."""

    temperature: float
    top_k: int
    top_p: float
    stop_token_ids: list[int]
    min_p: float
    repetition_penalty: float


def read_generation_defaults(directory: Path, tokenizer: Tokenizer) -> GenerationDefaults:
    """Read generation_config.json; eos is looked for there, then in config.json, then with the tokenizer.

    Raises:
        InvalidArgument: what stands there is no number, or one that no request might have either.
    """
    file = directory / "generation_config.json"
    generation = read_json(file)
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = read_json(directory / "config.json").get("eos_token_id")
    if eos is None:
        eos = tokenizer.token_id("eos_token")
    try:
        defaults = _defaults(_ids(eos), generation)
    except (TypeError, ValueError, OverflowError) as error:
        where = f"{file}, or the eos_token_id of config.json"
        raise InvalidArgument(f"{where}: a field has a value of the wrong kind: {error}") from error
    _check(defaults, file)
    return defaults


def _defaults(eos: tuple[int, ...], generation: dict[str, Any]) -> GenerationDefaults:
    return GenerationDefaults(
        eos=eos,
        temperature=_temperature(generation),
        top_k=int(_or(generation.get("top_k"), 0)),
        top_p=float(_or(generation.get("top_p"), 1.0)),
        min_p=float(_or(generation.get("min_p"), 0.0)),
        repetition_penalty=float(_or(generation.get("repetition_penalty"), 1.0)),
    )


def _check(defaults: GenerationDefaults, file: Path) -> None:
    """What stands in for a request's parameters has their ranges."""
    _, *sampling = defaults._fields
    try:
        SamplingParams(**{name: getattr(defaults, name) for name in sampling})
    except InvalidArgument as error:
        raise InvalidArgument(f"{file}: {error.message}") from None


def resolve_sampling(asked: SamplingParams, defaults: GenerationDefaults) -> ResolvedSampling:
    """Fill what the request leaves open."""
    stops = asked.stop_token_ids if asked.ignore_eos else (*asked.stop_token_ids, *defaults.eos)
    return ResolvedSampling(
        temperature=_or(asked.temperature, defaults.temperature),
        top_k=max(0, _or(asked.top_k, defaults.top_k)),
        top_p=_or(asked.top_p, defaults.top_p),
        stop_token_ids=sorted(set(stops)),
        min_p=_or(asked.min_p, defaults.min_p),
        repetition_penalty=_or(asked.repetition_penalty, defaults.repetition_penalty),
    )


def _temperature(generation: dict[str, Any]) -> float:
    if generation.get("do_sample") is False:
        return 0.0
    return float(_or(generation.get("temperature"), 1.0))


def _ids(eos: int | list[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(map(int, eos))


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
