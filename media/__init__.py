"""Images and sounds of requests: fetched within bounds, then decoded and prepared by the checkpoint's own processor, in
processes that may be killed. Knows nothing of encoders, prompts and protocols."""
