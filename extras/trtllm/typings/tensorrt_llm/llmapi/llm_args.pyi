class LoraConfig:
    def __init__(
        self,
        *,
        lora_target_modules: list[str] = ...,
        max_lora_rank: int = 64,
        max_loras: int = ...,
        max_cpu_loras: int = ...,
    ) -> None: ...
