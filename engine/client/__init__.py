"""The engine's half in the server's process: text to ids, requests to engine cores, chunks back."""
