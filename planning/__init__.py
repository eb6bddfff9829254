"""What a fleet would do, before there is one: the real scheduler, cache and routing in a simulated time."""
