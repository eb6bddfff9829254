"""The v2 face of every text model, over TensorRT-LLM."""

from ....engine.text_models.test_infer import *  # noqa: F403
