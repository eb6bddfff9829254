"""How many different adapters run at once. The running set has one object of it, and only where that is bounded."""
