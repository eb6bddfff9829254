"""What a checkpoint on disk says: its configuration, weights, vocabulary limits, and how ranks share it."""
