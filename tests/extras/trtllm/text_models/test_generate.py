"""What every text model does, over TensorRT-LLM."""

from ....engine.text_models.test_generate import *  # noqa: F403
