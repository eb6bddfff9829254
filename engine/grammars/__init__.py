"""What text a request may get: grammars, compiled for a vocabulary, and matchers that follow sequences."""
