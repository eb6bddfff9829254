"""Models of ONNX Runtime."""
