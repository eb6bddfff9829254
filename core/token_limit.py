"""How many tokens a text may have, and the one judgement of whether a sequence fits."""

from typing import NamedTuple

from .errors import ContextLengthExceeded


class TokenLimit(NamedTuple):
    """The most tokens of a text. `subject` begins the error message, up to the number."""

    tokens: int
    subject: str = "this model's maximum context length is"

    def error(self, what: str, field: str) -> ContextLengthExceeded:
        """The error for a longer text, whose length `what` describes."""
        return ContextLengthExceeded(f"{self.subject} {self.tokens} tokens: {what}", field=field)

    def check_sequence(self, prompt: int, new: int, prompt_field: str = "prompt") -> None:
        """Raises `ContextLengthExceeded` if the prompt's and the new tokens together exceed the limit; its `field` is
        the parameter to change, `prompt_field` that of the prompt."""
        if prompt + new <= self.tokens:
            return
        if prompt < self.tokens:
            raise self.error(f"a prompt of {prompt} with max_tokens {new} exceeds it", "max_tokens")
        raise self.error(f"a prompt of {prompt} leaves no room for an answer", prompt_field)
