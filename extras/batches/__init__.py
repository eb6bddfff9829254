"""OpenAI's Files and Batch API: files on disk, and batches of requests that run beside those of clients."""
