"""What sessions asked to keep of a cache, within a budget. The cache has one object of it, and only where it has such a
budget."""
