"""Randomly malformed requests, clients and scheduler trials, for the proofs and tests."""
