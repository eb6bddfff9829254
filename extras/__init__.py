"""What extends the server as anybody's package may: each folder by entry points, over the contracts in core."""
