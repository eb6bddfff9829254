"""Text to token ids and back, and chat templates. Imports neither torch nor transformers."""
