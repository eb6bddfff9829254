"""The OpenAI API, and what clients of vLLM expect beside it."""
