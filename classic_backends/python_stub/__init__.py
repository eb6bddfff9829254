"""The process of a Python model's instance: the user's `model.py`, and the API that it imports.

Runs in any Python from 3.8 on, in an environment that has numpy and none of this server's packages. The server imports
`messages` and `tensor_memory`, which both sides speak; nothing here imports anything of ours outside this package.
"""
