"""Several processes that compute one model: their arrangement, how plans reach them, how results come back."""
