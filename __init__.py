"""Charonia: a streaming, LLM-centric inference server that speaks Triton's and OpenAI's protocols."""

__version__ = "0.2.0"
