"""The server inside a program: the same models, engine and memory budget, without a wire.

`server` has models of tensors in the shape of Triton's in-process API, `llm` a language model in that of vLLM's offline
one; both ask a gateway that lives in the event loop of `loop_thread`. What programs import stands in `charonia`.
"""
