"""A classic model's instance in a process of its own, reached over a pipe and shared memory."""
