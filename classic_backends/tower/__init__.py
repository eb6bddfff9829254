"""The towers of models that see or hear: images and sounds, as their processors cut them, to rows that a language model
takes or attends to."""
