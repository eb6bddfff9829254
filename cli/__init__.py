"""The command line and composition root: flags are read, a server is built, run, stopped. Nothing imports it."""
