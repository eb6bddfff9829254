"""Speculation: who drafts, and how many of the drafts a step verifies. The scheduler asks one object, if there is
one."""
