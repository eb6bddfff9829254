"""A worker of NVIDIA Dynamo: its frontends and routers reach the engine by Dynamo's own planes, token ids in and out.

Only `backend.py` imports ai-dynamo, and `command.py` that when it is asked for.
"""
