"""Child processes, shared memory, and facts about this host."""
