"""What ops take beside tensors and states, in the words of a model rather than as an op's numbers."""

from __future__ import annotations

from dataclasses import dataclass

from apu_engine._native import lib

ROPE_PAIRS: int = lib.APU_ROPE_PAIRS
ROPE_HALVES: int = lib.APU_ROPE_HALVES


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of pair i of a head's first `dims` by position * frequency_scale * base^(-2i/dims) / factor_i.

    YaRN (arXiv 2309.00071) mixes in the unscaled frequencies by `extrapolation`, between the dimensions that
    turn `beta_fast` and `beta_slow` times over `original_context` tokens, rounded to `whole` dimensions. sin
    and cos are multiplied by `magnitude`.
    """

    dims: int
    style: int = ROPE_PAIRS
    base: float = 10000.0
    frequency_scale: float = 1.0
    extrapolation: float = 0.0
    magnitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_context: int = 0
    whole: bool = True

    def ints(self, third: int = 0) -> tuple[int, ...]:
        """i0 to i4 of an op that rotates; i3 is its own."""
        return self.dims, self.style, self.original_context, third, int(not self.whole)

    def floats(self, eps: float) -> tuple[float, ...]:
        """f0 to f6 of an op that rotates, `eps` of its norms first."""
        return (
            eps,
            self.base,
            self.frequency_scale,
            self.extrapolation,
            self.magnitude,
            self.beta_fast,
            self.beta_slow,
        )


@dataclass(frozen=True, slots=True)
class Streams:
    """Hyper-connections (arXiv 2512.24880): `count` streams in place of one residual, mixed by a matrix that
    `iterations` make doubly stochastic; `eps` is added to what is divided by.
    """

    count: int
    iterations: int
    eps: float


@dataclass(frozen=True, slots=True)
class Pages:
    """Where a state's pages come from: a group, the tokens that it looks back on (0: all), and how many there are."""

    group: int
    window: int
    count: int
