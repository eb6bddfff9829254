"""What a route costs, counted once."""

from charonia.bench.routes import lookup_microseconds, routed_gateway


async def test_every_kind_finds_a_version() -> None:
    gateway, names = routed_gateway()
    assert len(names) == 4
    for name in names:
        assert await lookup_microseconds(gateway, name, 20) > 0
    entry = gateway.registry.entries["m"]
    assert [each.in_flight.count for each in entry.loaded_versions.values()] == [0, 0]
