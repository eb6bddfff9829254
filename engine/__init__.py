"""Language models: checkpoints, layers, executors, the engine core process and its client."""
