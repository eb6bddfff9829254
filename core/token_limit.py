"""How many tokens a text may have, and the one judgement of whether a sequence fits."""

from typing import NamedTuple

from .errors import ContextLengthExceeded


class TokenLimit(NamedTuple):
    """The number of tokens that a text may have, and the beginning of the error message, up to the number."""

    tokens: int
    subject: str = "this model's maximum context length is"

    def error(self, what: str, field: str) -> ContextLengthExceeded:
        """The error for a text beyond it; `what` says how long that is."""
        return ContextLengthExceeded(f"{self.subject} {self.tokens} tokens: {what}", field=field)

    def check_sequence(self, prompt: int, new: int, prompt_field: str = "prompt") -> None:
        """Raises `ContextLengthExceeded` where a prompt of so many tokens and so many new ones are beyond it together;
        `field` is the parameter to change. `prompt_field`: the one that the prompt came in."""
        if prompt + new <= self.tokens:
            return
        if prompt < self.tokens:
            raise self.error(f"a prompt of {prompt} with max_tokens {new} exceeds it", "max_tokens")
        raise self.error(f"a prompt of {prompt} leaves no room for an answer", prompt_field)
