"""TensorRT-LLM as an engine behind our language model: its `LLM` API, with our queue in front of it."""
