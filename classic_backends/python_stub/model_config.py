"""The config that a model's `auto_complete_config` is given, and may add to."""

from __future__ import annotations

from typing import Any


class ModelConfig:
    """A model's config with the methods that complete it. What the config file says wins: a contradiction raises."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raises `ValueError` if the config file has a larger one."""
        declared = self._config.get("max_batch_size", 0)
        if declared > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {declared}, but in auto_complete_config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Batch requests, unless the config has chosen another scheduler."""
        if "sequence_batching" not in self._config and "ensemble_scheduling" not in self._config:
            self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        for name in transaction_policy_dict:
            if name != "decoupled":
                raise ValueError(
                    f"model transaction property in auto_complete_config function for model '{self._name}' contains "
                    "property other than 'decoupled'."
                )
        if "decoupled" not in transaction_policy_dict:
            raise ValueError(
                f"model transaction property in auto_complete_config function for model '{self._name}' is missing "
                "'decoupled' property"
            )
        decoupled = transaction_policy_dict["decoupled"]
        declared = self._config.get("model_transaction_policy", {}).get("decoupled")
        if declared and not decoupled:
            raise ValueError(
                "transaction policy conflict: configuration has 'decoupled' as true, but in auto_complete_config "
                f"function for model '{self._name}' it is false"
            )
        self._config["model_transaction_policy"] = {"decoupled": bool(decoupled)}

    # The parameters bear the names that Triton's have: models may pass them by name.
    def add_input(self, input: dict[str, Any]) -> None:
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: dict[str, Any]) -> None:
        self._add("output", output, ("name", "data_type", "dims"))

    @property
    def _name(self) -> str:
        return str(self._config.get("name", ""))

    def _add(self, kind: str, tensor: dict[str, Any], allowed: tuple[str, ...]) -> None:
        where = f"in auto_complete_config function for model '{self._name}'"
        if "name" not in tensor:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        name = tensor["name"]
        if any(each not in allowed for each in tensor):
            others = ", ".join(f"'{each}'" for each in allowed[:-1])
            raise ValueError(f"{kind} '{name}' {where} contains property other than {others} and '{allowed[-1]}'.")
        for each in ("data_type", "dims"):
            if each not in tensor:
                raise ValueError(f"{kind} '{name}' {where} is missing '{each}' property.")
        declared = next((each for each in self._config.setdefault(kind, []) if each["name"] == name), None)
        if declared is None:
            self._config[kind].append(tensor)
            return
        if declared["data_type"] != tensor["data_type"]:
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {declared['data_type']} for "
                f"{kind} '{name}', model provides {tensor['data_type']}"
            )
        if [int(size) for size in declared["dims"]] != [int(size) for size in tensor["dims"]]:
            raise ValueError(
                f"model '{self._name}', tensor '{name}': the model expects dims {tensor['dims']} but the model "
                f"configuration specifies dims {declared['dims']}"
            )
        if bool(declared.get("optional", False)) != bool(tensor.get("optional", declared.get("optional", False))):
            raise ValueError(
                f"model '{self._name}', tensor '{name}': the model expects optional {tensor['optional']} but the model "
                f"configuration specifies optional {declared.get('optional', False)}"
            )
