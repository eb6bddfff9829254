"""TensorRT-LLM: as an engine behind our language model, its `LLM` API with our queue in front of it; and the models of
Triton's TensorRT-LLM repositories, by the tensors that their clients know, on that engine or on our own."""
