"""Long proofs of `make proof`: soaks, floods, kills, random drivers."""
