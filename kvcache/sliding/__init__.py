"""What layers with a window keep of a sequence: the blocks of its last tokens. The manager asks one object, and only
where a model has such layers."""
