"""The vocabulary every other room speaks: tensors, requests, the Model contract, errors.

Knows nothing of servers, of torch, or of how any model computes.
"""
