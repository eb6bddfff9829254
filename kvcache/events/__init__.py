"""What becomes of a cache, for who follows it. Pools tell one object, if there is one."""
