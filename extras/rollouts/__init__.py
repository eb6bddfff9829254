"""Rollouts of routes, which bring a new version to more and more requests, and shadows, which get copies of some."""
