"""Requests that were changed at random: what the fuzzing proofs send."""
