"""Dynamic batching: queues, batches, instances that execute them, and the responses they send."""
