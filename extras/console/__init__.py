"""The console: a page in the browser over this server's own endpoints."""
