"""What the hub tells its workers of the models that are served."""

from dataclasses import replace
from typing import Any

from charonia.core.model import Capabilities, ModelConfig, ModelStats
from charonia.http_workers.hub import ControlHub
from charonia.http_workers.snapshot import ServedModels
from charonia.repository.gateway import InProcessGateway
from charonia.repository.model_registry import LoadedModel


class Idle:
    """A model that nobody asks."""

    capabilities = Capabilities()

    def stats(self) -> ModelStats:
        return ModelStats(True)


async def test_workers_hear_of_an_older_version_that_becomes_decoupled() -> None:
    gateway: Any = InProcessGateway()
    hub = ControlHub(gateway, None, None)  # type: ignore[arg-type]
    model: Any = Idle()
    versions = {number: LoadedModel(model, ModelConfig("m", number, "ensemble")) for number in ("1", "2")}
    gateway.registry.get_or_add("m").publish(versions)
    before = hub.push()
    assert hub.push() is before
    versions["1"].config = replace(versions["1"].config, decoupled=True)
    told = ServedModels.of_pickle(hub.push().models)
    assert {served.config.version: served.config.decoupled for served in told.models} == {"1": True, "2": False}
