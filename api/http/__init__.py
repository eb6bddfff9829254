"""HTTP itself, whatever is said over it: the server, connections, request contexts, encodings, limits."""
