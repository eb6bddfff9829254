"""The KServe v2 protocol over HTTP with Triton's extensions, and its embeddings in clouds."""
