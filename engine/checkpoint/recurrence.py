"""What recurrent layers are like, in numbers: the states that they keep of a sequence, and the sizes they come from.
`hybrid_config.py` and `mamba_config.py` read them from config.json."""

from typing import NamedTuple, TypeAlias


class LayerState(NamedTuple):
    """What a layer keeps of a sequence where attention would keep keys and values of every token: the last inputs of a
    causal convolution, in the model's dtype, and `heads` matrices of `rows` x `columns` in float32 (0: none)."""

    channels: int
    """Channels of the convolution."""
    window: int
    """Inputs of each channel that are kept: one less than the convolution reads."""
    heads: int = 0
    rows: int = 0
    columns: int = 0

    def bytes(self, itemsize: int) -> int:
        """Bytes of one sequence, in a model whose numbers have `itemsize` bytes."""
        return self.channels * self.window * itemsize + self.heads * self.rows * self.columns * 4


class DeltaNetSpec(NamedTuple):
    """Layers of the gated delta rule (arXiv 2412.06464). Each key head serves equally many value heads, one after the
    other. The convolution reads `kernel` inputs."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def weights(self, hidden: int) -> int:
        """Numbers in the matrices of such a layer, of a model whose hidden states are `hidden` wide."""
        return hidden * (2 * self.key_width + 3 * self.value_width + 2 * self.value_heads)

    def share(self, rank: int, size: int) -> "DeltaNetSpec":
        """What such a layer is like on a rank of `size` that share its heads."""
        return self._replace(key_heads=self.key_heads // size, value_heads=self.value_heads // size)

    def refusal(self, size: int) -> str | None:
        """Why so many ranks can't share its heads; None: they can."""
        if self.key_heads % size:
            return f"{self.key_heads} key heads of its delta rule can't be shared evenly by {size} ranks"
        return None

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def state(self) -> LayerState:
        channels = 2 * self.key_width + self.value_width
        return LayerState(channels, self.kernel - 1, self.value_heads, self.key_dim, self.value_dim)


class ShortConvolutionSpec(NamedTuple):
    """Gated layers of a convolution that reads `kernel` inputs of `channels`, as LFM2's."""

    channels: int
    kernel: int
    bias: bool

    def weights(self, hidden: int) -> int:
        return 4 * hidden * self.channels

    def share(self, rank: int, size: int) -> "ShortConvolutionSpec":
        """See `DeltaNetSpec.share`; shares of channels may differ by one."""
        first, end = (self.channels * place // size for place in (rank, rank + 1))
        return self._replace(channels=end - first)

    def refusal(self, size: int) -> str | None:
        return f"its {self.channels} channels give nothing to some of {size} ranks" if self.channels < size else None

    @property
    def state(self) -> LayerState:
        return LayerState(self.channels, self.kernel - 1)


class Mamba2Spec(NamedTuple):
    """Mamba-2's layers (arXiv 2405.21060), whose convolution reads `kernel` inputs."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    """B and C are of a group, which serves equally many heads, one after the other."""
    kernel: int
    bias: bool
    """Whether the projection into the layer has a bias."""
    convolution_bias: bool
    step_limits: tuple[float, float]
    """Steps are held between these."""
    out_bias: bool = False
    normalised: bool = True
    """Whether the result has a norm besides its gate."""
    gates_first: bool = True
    """The gate is before that norm, and not after."""
    factors: tuple[float, ...] = (1.0,) * 5
    """What gate, x, B, C and steps are multiplied by, as they come out of the projection."""

    def weights(self, hidden: int) -> int:
        return hidden * (2 * self.inner + self.state.channels + self.heads)

    def share(self, rank: int, size: int) -> "Mamba2Spec":
        """See `DeltaNetSpec.share`; with more ranks than groups, several ranks have the same one."""
        return self._replace(heads=self.heads // size, groups=max(self.groups // size, 1))

    def refusal(self, size: int) -> str | None:
        if self.heads % size:
            return f"{self.heads} heads of Mamba-2 can't be shared evenly by {size} ranks"
        if self.groups % size and size % self.groups:
            shared = f"{self.groups} groups of Mamba-2's heads can be neither shared evenly by {size} ranks"
            return f"{shared} nor held by equally many of them each"
        return None

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def state(self) -> LayerState:
        channels = self.inner + 2 * self.groups * self.state_size
        return LayerState(channels, self.kernel - 1, self.heads, self.state_size, self.head_dim)


class MambaSpec(NamedTuple):
    """The layers of Mamba's first line (arXiv 2312.00752), whose convolution reads `kernel` inputs of each channel."""

    channels: int
    state_size: int
    """Numbers that each channel keeps."""
    step_rank: int
    """Numbers that the steps of all channels are made of."""
    kernel: int
    bias: bool
    """Whether the projections into the layer and out of it have biases."""
    convolution_bias: bool
    norm_eps: float | None = None
    """Of the norms of B, C and what steps are made of; None: they have none."""

    def weights(self, hidden: int) -> int:
        return self.channels * (3 * hidden + 2 * (self.step_rank + self.state_size))

    def share(self, rank: int, size: int) -> "MambaSpec":
        return self

    def refusal(self, size: int) -> str | None:
        return None if size == 1 else "channels of Mamba's first line make B and C together, and no ranks share them"

    @property
    def state(self) -> LayerState:
        return LayerState(self.channels, self.kernel - 1, 1, self.state_size, self.channels)


class SharedBlocksSpec(NamedTuple):
    """The transformer blocks that layers of Zamba 2 use in turns, beside their states."""

    blocks: int
    adapter_rank: int
    """Numbers between the two matrices that each use has beside its block's MLP."""

    def weights_of_use(self, hidden: int, packed: int, width: int) -> int:
        """Numbers in the matrices that a use has beside those of other layers that attend, of a block with so many
        `packed` queries, keys and values and an MLP of this `width`."""
        return hidden * (packed + hidden + self.adapter_rank) + 2 * width * self.adapter_rank


RecurrenceSpec: TypeAlias = DeltaNetSpec | ShortConvolutionSpec | Mamba2Spec | MambaSpec
"""What those layers of a model are that keep a state; all that do are alike."""
