"""What the blocks of sequences stand for, where somebody follows the cache."""
