"""The parameters of models: which there are, what a search tries without being told, and what a value does to a config.

A classic model's are fields of its config and parameters of its backend, a language model's are options of its engine,
all by their own names. In a graph the name of the model stands before it: `step.instances`.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import msgspec

from ...core.errors import InvalidArgument, did_you_mean
from ...core.model import RawConfig
from ...engine.options import EngineOptions, engine_config, parse_settings, read_speculation_config
from ...processes.host import usable_cores
from ...repository.config_io import complete_fields
from ...repository.model_source import ModelSource, parameters_of
from .search_goal import ParameterValue
from .search_space import Canonicalize, TunedParameter
from .tuned_models import TunedModels, is_composed, is_language_model

INSTANCES, BATCH, DELAY, PREFERRED = (
    "instances",
    "max_batch_size",
    "max_queue_delay_microseconds",
    "preferred_batch_size",
)
SPECULATION, SEQUENCES, BATCHED_TOKENS = "speculation", "max_num_seqs", "max_num_batched_tokens"
OFF = "off"
"""The value of a parameter that takes away what it would set."""
_PARAMETER = "parameters."
"""Before the name of any parameter of a config, which a backend may know or not."""

RUNTIME_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": (
        "intra_op_thread_count",
        "inter_op_thread_count",
        "execution_mode",
        "session_thread_pool_allow_spinning",
        "enable_mem_arena",
        "enable_mem_pattern",
    ),
    "openvino": ("INFERENCE_NUM_THREADS", "NUM_STREAMS", "PERFORMANCE_HINT", "INFERENCE_PRECISION_HINT"),
    "pytorch": ("INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT"),
    "encoder": ("intra_op_thread_count", "max_batch_tokens"),
    "fil": ("cpu_nthread", "chunk_size"),
}
"""What of a backend's parameters may make a model faster; its threads first, where it has some."""

_MONOTONE_METRICS: Mapping[str, tuple[str, ...]] = {
    INSTANCES: ("memory",),
    BATCH: ("memory",),
    SEQUENCES: ("throughput", "memory"),
    BATCHED_TOKENS: ("memory",),
}
_TAKEN_CARE_OF = ("model", "tokenizer", "executor", SPECULATION)
_LLM_SEQUENCES = (4, 8, 16, 32, 64, 128, 256)
_LLM_TOKENS = (256, 512, 1024, 2048)
_DELAYS = (OFF, 0, 1000, 5000)
_BATCHES = (1, 4, 16, 64)
_DRAFTS = 4


class ClosedLoop(msgspec.Struct, frozen=True):
    """What is known of a load that bounds what can make a difference: at most `concurrency` requests at a time (None:
    no bound), each with `batch` items."""

    concurrency: int | None
    batch: int = 1

    @property
    def items(self) -> int | None:
        return None if self.concurrency is None else self.concurrency * self.batch


def parse_sweeps(texts: Sequence[str], models: TunedModels) -> list[TunedParameter]:
    """The parameters of `NAME=VALUE,VALUE`, checked against the models.

    Raises:
        InvalidArgument: another form, an unknown parameter, or a value that it cannot have.
    """
    parameters = [_parse_sweep(text, models) for text in texts]
    names = [parameter.name for parameter in parameters]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidArgument(f"sweep: the knob '{twice[0]}' is there twice", field="sweep")
    return parameters


def _parse_sweep(text: str, models: TunedModels) -> TunedParameter:
    name, equals, listed = text.partition("=")
    values = tuple(map(_parse_value, filter(None, (value.strip() for value in listed.split(",")))))
    if not equals or not values:
        raise InvalidArgument(f"sweep: '{text}' is not of the form KNOB=VALUE,VALUE", field="sweep")
    if len(set(values)) < len(values):
        raise InvalidArgument(f"sweep: '{text}' has a value twice", field="sweep")
    source, own = owner(name, models)
    check_parameter(source, own, values)
    return make_parameter(name, own, values, value_now(source, own))


def _parse_value(text: str) -> ParameterValue:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d*\.\d+", text) else text


def owner(name: str, models: TunedModels) -> tuple[ModelSource, str]:
    """The model of a parameter, and its name there. Raises `InvalidArgument` where it names none of a graph's."""
    for source in sorted(models.models, key=lambda source: -len(source.name)):
        if models.is_graph and name.startswith(f"{source.name}."):
            return source, name.removeprefix(f"{source.name}.")
    if models.is_graph and is_composed(models.loaded.config):
        steps = ", ".join(source.name for source in models.models if not is_composed(source.config))
        message = f"sweep: '{name}' names no model: write MODEL.KNOB, with MODEL one of {steps}"
        raise InvalidArgument(message, field="sweep")
    return models.loaded, name


def known_parameters(source: ModelSource) -> list[str]:
    """The names of a model's parameters."""
    if is_composed(source.config):
        return []
    if is_language_model(source.config):
        options = [name for name in EngineOptions.__dataclass_fields__ if not name.startswith("fake_")]
        return [SPECULATION, *(name for name in options if name not in _TAKEN_CARE_OF)]
    return [INSTANCES, BATCH, DELAY, PREFERRED, *RUNTIME_PARAMETERS.get(source.backend, ())]


def check_parameter(source: ModelSource, name: str, values: Iterable[ParameterValue]) -> None:
    """Raises `InvalidArgument` where a model has no such parameter, or the parameter no such value."""
    known = known_parameters(source)
    if is_composed(source.config):
        raise InvalidArgument(f"sweep: '{source.name}' only asks other models; turn knobs of those", field="sweep")
    is_free = name.startswith(_PARAMETER) and not is_language_model(source.config)
    if name not in known and not is_free and not (is_language_model(source.config) and name.startswith("fake_")):
        few = ", ".join(known) if len(known) < 12 else f"{SPECULATION} and the engine's options, as in {SEQUENCES}"
        message = f"sweep: model '{source.name}' has no knob '{name}'; known are {few}{did_you_mean(name, known)}"
        raise InvalidArgument(message, field="sweep")
    try:
        for value in values:
            _check_value(source, name, value)
    except InvalidArgument as error:
        raise InvalidArgument(f"sweep: {error.message}", field="sweep") from None


def _check_value(source: ModelSource, name: str, value: ParameterValue) -> None:
    if is_language_model(source.config):
        if value != OFF:
            key, written = _engine_setting(name, value)
            parse_settings({key: written}, EngineOptions)
            if name == SPECULATION:
                read_speculation_config(str(written))
        return
    least = {INSTANCES: 1, BATCH: 1, DELAY: 0, PREFERRED: 1}.get(name)
    may_be_off = name not in (INSTANCES, BATCH)
    if least is not None and not (may_be_off and value == OFF) and not (isinstance(value, int) and value >= least):
        or_off = f", or '{OFF}'" if may_be_off else ""
        raise InvalidArgument(f"'{name}' must be a whole number of at least {least}{or_off}, got '{value}'")
    if name == INSTANCES and len(source.config["instance_group"]) > 1:
        raise InvalidArgument(f"model '{source.name}' has several instance groups, which '{INSTANCES}' cannot count")


def make_parameter(
    name: str, own: str, values: tuple[ParameterValue, ...], now: ParameterValue | None
) -> TunedParameter:
    """`own`: its name without its model's; `now`: the value that holds without a search, if that is known."""
    ordered = all(isinstance(value, (int, float)) for value in values if value != OFF) and len(values) > 1
    if ordered:
        values = tuple(sorted(values, key=lambda value: (value != OFF, 0 if isinstance(value, str) else value)))
    index = values.index(now) if now in values else _nearest(values, now)
    monotone_metrics = _MONOTONE_METRICS.get(own, ())
    return TunedParameter(name=name, values=values, now=index, ordered=ordered, monotone_metrics=monotone_metrics)


def _nearest(values: Sequence[ParameterValue], now: ParameterValue | None) -> int:
    numbers = {index: value for index, value in enumerate(values) if isinstance(value, (int, float))}
    if isinstance(now, (int, float)) and numbers:
        return min(numbers, key=lambda index: abs(numbers[index] - now))
    return 0


def value_now(source: ModelSource, name: str) -> ParameterValue | None:
    """What a model's config says of a parameter, or what holds where it says nothing; None where that is not known."""
    config, parameters = source.config, parameters_of(source.config)
    batching = config.get("dynamic_batching")
    if is_language_model(config):
        if name == SPECULATION:
            return None if "speculative_config" in parameters else OFF
        written = parameters.get(name, "")
        return _parse_value(written) if written else _engine_default(name)
    match name:
        case "instances":
            return int(config["instance_group"][0]["count"]) or 1 if config["instance_group"] else 1
        case "max_batch_size":
            return int(config["max_batch_size"])
        case "max_queue_delay_microseconds":
            return OFF if batching is None else int(batching["max_queue_delay_microseconds"])
        case "preferred_batch_size":
            sizes = [] if batching is None else batching["preferred_batch_size"]
            return int(sizes[0]) if len(sizes) == 1 else OFF
    own = name.removeprefix(_PARAMETER)
    if written := parameters.get(own, ""):
        return _parse_value(written)
    return usable_cores().threads if own in RUNTIME_PARAMETERS.get(source.backend, ())[:1] else None


def _engine_default(name: str) -> ParameterValue | None:
    config = engine_config("", EngineOptions())
    parts = (config, config.scheduler, config.cache, config.parallel)
    default = next((value for part in parts if (value := getattr(part, name, None)) is not None), None)
    if isinstance(default, bool):
        return str(default).lower()
    return default if isinstance(default, (int, float, str)) else None


def default_parameters(models: TunedModels, loop: ClosedLoop, threads: int) -> list[TunedParameter]:
    """What is turned where nothing is said: what changes no answer. `threads`: of this machine, to compute with."""
    parameters = []
    # What a step is asked is up to the graph; a batch of that is what it must take at least.
    bound = loop if not models.is_graph else ClosedLoop(None, max(1, models.loaded.config["max_batch_size"]))
    for source in models.models:
        for own, values in _default_values(source, bound, threads):
            now = value_now(source, own)
            # What holds now is always among what is tried.
            known = values if now is None or now in values or now == 0 else (*values, now)
            if len(known) > 1:
                name = f"{source.name}.{own}" if models.is_graph else own
                parameters.append(make_parameter(name, own, tuple(known), now))
    return parameters


def _default_values(
    source: ModelSource, loop: ClosedLoop, threads: int
) -> Iterator[tuple[str, tuple[ParameterValue, ...]]]:
    if is_composed(source.config):
        return
    counts = tuple(count for count in (1, 2, 4, 8, 16, 32) if count <= max(2, threads))
    if is_language_model(source.config):
        most = loop.concurrency or _LLM_SEQUENCES[-1]
        sequences = [count for count in _LLM_SEQUENCES if count < most]
        yield SEQUENCES, tuple([*sequences, next((n for n in _LLM_SEQUENCES if n >= most), _LLM_SEQUENCES[-1])][-4:])
        yield BATCHED_TOKENS, _LLM_TOKENS
        return
    yield INSTANCES, counts if len(source.config["instance_group"]) < 2 else ()
    if source.config["max_batch_size"] > 0:
        bound = loop.items
        smaller = [size for size in _BATCHES if bound is None or size < 4 * bound]
        yield BATCH, tuple(size for size in smaller if size >= loop.batch)
        yield DELAY, _DELAYS
    for name in RUNTIME_PARAMETERS.get(source.backend, ())[:1]:
        yield name, tuple(count for count in counts if count <= threads)


def equivalence(parameters: Sequence[TunedParameter], models: TunedModels, loop: ClosedLoop) -> Canonicalize:
    """What a load cannot tell apart: batches and sequences above what is there at a time, and how a batch that cannot
    form is waited for. Only of a model that takes the load itself: what a step is asked is up to the graph."""
    by_name = {parameter.name: parameter for parameter in parameters}

    def unite(settings: dict[str, ParameterValue], name: str, enough: int | None) -> None:
        """All values from `enough` on become the least of them."""
        if name in by_name and enough is not None:
            numbers = [value for value in by_name[name].values if isinstance(value, int) and value >= enough]
            if settings[name] in numbers:
                settings[name] = min(numbers)

    def canonicalize(settings: Mapping[str, ParameterValue]) -> Mapping[str, ParameterValue]:
        if models.is_graph:
            return settings
        united = dict(settings)
        unite(united, SEQUENCES, loop.concurrency)
        unite(united, BATCH, loop.items)
        delay = united.get(DELAY, value_now(models.loaded, DELAY))
        if delay == OFF and not is_language_model(models.loaded.config):
            unite(united, BATCH, loop.batch)
        size = united.get(BATCH, models.loaded.config["max_batch_size"])
        alone = isinstance(size, int) and 0 < size < 2 * loop.batch
        if alone and DELAY in united:
            united[DELAY] = by_name[DELAY].values[0]
        if PREFERRED in united and (alone or delay == OFF):
            united[PREFERRED] = by_name[PREFERRED].values[0]
        return united

    return canonicalize


def configured(models: TunedModels, settings: Mapping[str, ParameterValue]) -> dict[str, RawConfig]:
    """Every model's config with these settings, by its name."""
    configs = {source.name: deepcopy({**source.config}) for source in models.models}
    # The delay last: without a batcher nothing else of it is said.
    for name, value in sorted(settings.items(), key=lambda setting: setting[0].endswith(DELAY)):
        source, own = owner(name, models)
        _apply(configs[source.name], is_language_model(source.config), own, value)
    for config in configs.values():
        _mend_preferred(config)
    return {name: complete_fields(config) for name, config in configs.items()}


def _apply(config: dict[str, Any], is_llm: bool, name: str, value: ParameterValue) -> None:
    if is_llm:
        key, written = _engine_setting(name, value)
        _set_parameter(config, key, value if value == OFF else written)
    elif name == INSTANCES:
        config["instance_group"] = config["instance_group"] or [{}]
        config["instance_group"][0]["count"] = int(value)
    elif name == BATCH:
        config["max_batch_size"] = int(value)
    elif name == DELAY and value == OFF:
        config.pop("dynamic_batching", None)
    elif name == DELAY:
        config.setdefault("dynamic_batching", {})["max_queue_delay_microseconds"] = int(value)
    elif name == PREFERRED and value == OFF:
        config.get("dynamic_batching", {}).pop("preferred_batch_size", None)
    elif name == PREFERRED:
        config.setdefault("dynamic_batching", {})["preferred_batch_size"] = [int(value)]
    else:
        _set_parameter(config, name.removeprefix(_PARAMETER), value)


def _set_parameter(config: dict[str, Any], name: str, value: ParameterValue) -> None:
    if value == OFF:
        config["parameters"].pop(name, None)
    else:
        config["parameters"][name] = {"string_value": str(value)}


def _mend_preferred(config: dict[str, Any]) -> None:
    """Sizes that a smaller largest batch rules out are preferred no more."""
    batching, most = config.get("dynamic_batching", {}), config["max_batch_size"]
    if most and "preferred_batch_size" in batching:
        batching["preferred_batch_size"] = [size for size in batching["preferred_batch_size"] if size <= most]


def _engine_setting(name: str, value: ParameterValue) -> tuple[str, ParameterValue]:
    """The option that a parameter of a language model sets: `speculation` is METHOD or METHOD:TOKENS."""
    if name != SPECULATION:
        return name, value
    method, _, tokens = str(value).partition(":")
    if value != OFF and (not method.isidentifier() or (tokens and not tokens.isdecimal())):
        raise InvalidArgument(f"'{SPECULATION}' must be '{OFF}' or METHOD:TOKENS, as in ngram:4, got '{value}'")
    written: dict[str, Any] = {"method": method, "num_speculative_tokens": int(tokens or _DRAFTS)}
    return "speculative_config", msgspec.json.encode(written).decode()


def engine_flags(settings: Mapping[str, ParameterValue]) -> str:
    """The settings of a single checkpoint as flags of `charonia serve`."""
    words = []
    for name, value in settings.items():
        key, written = _engine_setting(name, value)
        flag = key.replace("_", "-")
        if value != OFF:
            words.append({"true": f"--{flag}", "false": f"--no-{flag}"}.get(str(written), f"--{flag}={written}"))
    return shlex.join(words)
