"""Which models exist, which are loaded, and the gateway in front of them."""
