"""Models that are not language models, behind dynamic batching."""
