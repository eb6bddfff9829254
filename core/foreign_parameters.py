"""Parameters of other servers that would change the answer and that this server does not have. Requests with one are
refused."""

from collections.abc import Mapping
from typing import Any

FOREIGN_PARAMETERS = frozenset(
    (
        # vLLM's
        "ec_transfer_params",
        "logprob_token_ids",
        "prompt_embeds",
        "repetition_detection",
        "return_prompt_text",
        "return_routed_experts",
        "vllm_xargs",
        "watermarking",
        # SGLang's, TGI's, llama.cpp's, Ollama's, transformers' and others'
        "custom_logit_processor",
        "custom_params",
        "do_sample",
        "dry_allowed_length",
        "dry_base",
        "dry_multiplier",
        "dynatemp_exponent",
        "dynatemp_range",
        "ebnf",
        "epsilon_cutoff",
        "eta_cutoff",
        "grammar",
        "json_schema",
        "mirostat",
        "mirostat_eta",
        "mirostat_mode",
        "mirostat_tau",
        "n_predict",
        "n_probs",
        "no_repeat_ngram_size",
        "num_beams",
        "num_predict",
        "options",
        "penalty_alpha",
        "regex",
        "repeat_last_n",
        "repeat_penalty",
        "return_hidden_states",
        "samplers",
        "session_params",
        "smoothing_factor",
        "stop_regex",
        "tfs_z",
        "top_a",
        "top_n_sigma",
        "typical_p",
        "xtc_probability",
        "xtc_threshold",
    )
)

_ZERO_MEANS_SOMETHING = frozenset(
    (
        # switches, and numbers that are off at another value
        "do_sample",
        "n_predict",
        "num_beams",
        "num_predict",
        "repeat_penalty",
        "return_hidden_states",
        "return_prompt_text",
        "return_routed_experts",
        "tfs_z",
        "typical_p",
        "watermarking",
    )
)
FOREIGN_NO_OPS: Mapping[str, tuple[Any, ...]] = {
    **{name: (False,) if name in _ZERO_MEANS_SOMETHING else (False, 0) for name in sorted(FOREIGN_PARAMETERS)},
    "do_sample": (True,),
}
"""By the name of such a parameter: its values that ask for nothing."""
