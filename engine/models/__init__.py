"""One page per architecture."""
