"""What runs in the next step. Knows token counts and blocks; knows nothing of torch, ranks or text."""
