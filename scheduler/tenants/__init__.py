"""Which tenant is next, by counted service: for our steps, and for requests that wait for another engine. A queue with
one tenant asks nothing of it."""
