"""The towers of models that see: images, as their processors cut them, to rows of a language model's inputs."""
