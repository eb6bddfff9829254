"""Models wired together: ensembles, whose steps are other models of the server."""
