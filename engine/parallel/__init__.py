"""Several processes compute one model: who they are, how plans reach them and results come back."""
