"""The models of Triton's TensorRT-LLM repositories, by the tensors that their clients know."""
