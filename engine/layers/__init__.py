"""Column- and row-parallel layers that every architecture shares."""
