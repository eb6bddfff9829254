"""What a cache keeps of sequences whose layers have a recurrent state in place of keys and values: snapshots at the
ends of prefixes, and states before drafts. The cache has either only where a model has such layers."""
