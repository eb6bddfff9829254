"""Models that are made by hand, served by a gateway."""

from charonia.core.errors import CharoniaError
from charonia.core.model import Model
from charonia.repository.gateway import InProcessGateway
from charonia.repository.model_registry import LoadedModel


async def serve_model(gateway: InProcessGateway, model: Model, version: str) -> None:
    """Load and publish a model of the server's start; one that fails is known by its failure."""
    entry = gateway.registry.get_or_add(model.config.name)
    entry.awaited = True
    try:
        await model.load()
    except CharoniaError as error:
        entry.record_load_failure(error.message, [version])
    else:
        entry.publish({version: LoadedModel(model, model.config)})
