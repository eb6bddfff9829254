"""Encoders of text, bidirectional: embeddings and rerankers from their checkpoints."""
