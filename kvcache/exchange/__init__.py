"""What a cache gives away and gets beside its sequences: prefixes that other servers fetch, or have computed, and
images in a directory. Asks the cache; neither that nor the scheduler knows of it."""
