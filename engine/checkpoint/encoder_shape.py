"""What a decoder attends to beside its own tokens: the output of its model's encoder."""

from typing import NamedTuple

from ...core.errors import InvalidArgument
from ...scheduler.encoders.encoder_rows import EncoderRows

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class EncoderShape(NamedTuple):
    """Every layer of the decoder attends to all rows of one sequence's `EncoderRows`."""

    rows: int
    """The most rows that an encoder gives."""
    width: int
    """Numbers of a row."""
    vocab_size: int = 0
    """The vocabulary of the tokens that it reads; 0 where it reads none."""
    bins: int = 0
    """Numbers of each frame of the sounds that it hears; 0 where it hears none."""

    @property
    def reads_text(self) -> bool:
        return self.vocab_size > 0

    def check(self, encoded: EncoderRows | None) -> None:
        """Raises `InvalidArgument` for a sequence without rows, or with what the encoder can't have made."""
        if encoded is None:
            raise InvalidArgument("the model attends to an encoder's output, and the sequence has none")
        width = self.width * _BYTES.get(encoded.dtype, 0)
        if not 1 <= encoded.length <= self.rows or len(encoded.rows) != encoded.length * width:
            sent = f"{encoded.length} rows of {encoded.dtype} in {len(encoded.rows)} bytes"
            raise InvalidArgument(f"{sent} are not the encoder's: it gives 1 to {self.rows} of {self.width} numbers")

    def blank(self) -> EncoderRows:
        """What a sequence without meaning attends to."""
        return EncoderRows(self.rows, b"blank", bytes(2 * self.rows * self.width), "bfloat16")
