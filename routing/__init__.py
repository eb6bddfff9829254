"""Routes: names that stand for shares of other models. No I/O here, and no clock."""
