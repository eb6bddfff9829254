"""The doors: HTTP routes that translate and call the gateway. Knows no engine and no torch."""
