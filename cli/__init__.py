"""The composition root: what the command line asks is read, built, run and stopped. Nothing imports it."""
