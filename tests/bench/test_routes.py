"""What a route costs, counted once."""

from charonia.bench.routes import request_microseconds, routed_gateway


async def test_every_kind_finds_a_version() -> None:
    gateway, names = routed_gateway()
    assert len(names) == 8
    for name in names:
        for body in (True, False):
            assert await request_microseconds(gateway, name, 20, body) > 0
    entry = gateway.registry.entries["m"]
    assert [each.in_flight.count for each in entry.loaded_versions.values()] == [0, 0]
