"""The engine core process: the step loop, and the messages and sockets between it and the frontend."""
