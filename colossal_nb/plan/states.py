"""What a training step holds and computes, by arithmetic: bytes per parameter, sizes and FLOPs of a GPT."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from colossal_nb.plan.strategy import Strategy

# Bytes per parameter: working weight, its gradient, the optimizer's state. Gradients add up in fp32 whatever the
# precision. Adam keeps two fp32 moments, and an fp32 master where the working weights are of 16 bits; SGD keeps nothing
# but that master.
_GRADIENT_BYTES = 4
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_MOMENT_BYTES = {"adam": 8, "sgd": 0, "momentum": 4}


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of a rank's part of the model (after tensor and pipeline parallelism), exact."""

    parameter: Fraction
    gradient: Fraction
    optimizer: Fraction

    @property
    def total(self) -> Fraction:
        """All three."""
        return self.parameter + self.gradient + self.optimizer


def state_bytes(strategy: Strategy, optimizer: str = "adam") -> StateBytes:
    """What each parameter costs between steps; optimizers: adam, sgd, momentum (one fp32 moment).

    zero=1 divides the optimizer's part by dp, zero=2 the gradient as well, zero=3 all (ZeRO, arXiv 1910.02054, which
    counts gradients of 2 bytes).
    """
    if optimizer not in _MOMENT_BYTES:
        raise ValueError(f"optimizers are {', '.join(_MOMENT_BYTES)}; {optimizer!r} is none of them")
    weight = _WEIGHT_BYTES[strategy.precision]
    master = 4 if weight < 4 else 0
    shards = strategy.dp or 1
    return StateBytes(
        parameter=Fraction(weight, shards if strategy.zero >= 3 else 1),
        gradient=Fraction(_GRADIENT_BYTES, shards if strategy.zero >= 2 else 1),
        optimizer=Fraction(master + _MOMENT_BYTES[optimizer], shards if strategy.zero >= 1 else 1),
    )


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a GPT: learned positions, biases, an MLP of 4 x hidden, a head without bias."""

    vocab_size: int
    layers: int
    hidden: int
    max_length: int = 1024
    tied: bool = False

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        h = self.hidden
        per_layer = 12 * h * h + 13 * h  # qkv 3hh+3h, out hh+h, up 4hh+4h, down 4hh+h, two norms 4h
        return self._vocabulary + self.max_length * h + self.layers * per_layer + 2 * h

    @property
    def divided(self) -> int:
        """How many of them 1D tensor parallelism divides by tp; the rest (norms, positions, row biases) is whole."""
        h = self.hidden
        per_layer = 12 * h * h + 7 * h  # the four matrices, the biases of qkv and up
        return self._vocabulary + self.layers * per_layer

    def flops(self, batch: int, length: int) -> int:
        """FLOPs of one training step (forward, and backward twice that) over `batch` sequences, without recompute.

        A multiplication and an addition are two; attention is counted in full, also where it is causal:
        72 b s L h^2 (1 + s/6h + v/12Lh).
        """
        h, tokens = self.hidden, batch * length
        forward = self.layers * (24 * tokens * h * h + 4 * tokens * length * h) + 2 * tokens * h * self.vocab_size
        return 3 * forward

    @property
    def _vocabulary(self) -> int:
        return (1 if self.tied else 2) * self.vocab_size * self.hidden
