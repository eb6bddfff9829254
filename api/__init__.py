"""The endpoints: HTTP routes and gRPC calls, which translate and call the gateway. Knows no engine and no torch."""
