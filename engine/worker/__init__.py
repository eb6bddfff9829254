"""One rank's computation: executors, the model runner, sampling, log-probabilities."""
