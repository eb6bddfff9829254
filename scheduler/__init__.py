"""The scheduler: which tokens run in the next step. Knows token counts and blocks; nothing of torch, ranks or text."""
