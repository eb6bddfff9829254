"""`charonia analyze`: which configuration of a model is best, found by servers that it starts and puts under load."""
