"""Statistics of a linear layer's inputs and gradients, as methods receive them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from anybit.errors import InputError
from anybit.kernels import dispatch

SAMPLED = 16  # inputs of each forward that are kept as they are


@dataclass
class InputStats:
    """What scaling and activation grids need to know of a layer's inputs."""

    magnitudes: Tensor  # float32 [in], sum over tokens of |x_i|
    peaks: Tensor  # float32 [in], largest |x_i|
    energy: Tensor  # float32 [in], sum over tokens of x_i^2, all tokens alike
    rows: list[Tensor] = field(default_factory=list)  # [n, in] each: some inputs, evenly spaced

    @staticmethod
    def empty(in_features: int, device: torch.device | str = "cpu") -> InputStats:
        zeros = torch.zeros(3, in_features, device=device)
        return InputStats(zeros[0], zeros[1], zeros[2])

    def add(self, x: Tensor) -> None:
        """Accumulate inputs x [tokens, in]."""
        step = max(1, len(x) // SAMPLED)
        self.rows.append(x[step // 2 :: step][:SAMPLED].clone())
        sizes = x.float().abs()
        self.magnitudes += sizes.sum(0)
        self.peaks = torch.maximum(self.peaks, sizes.amax(0))
        self.energy += sizes.square_().sum(0)

    @property
    def sample(self) -> Tensor:
        """The kept inputs, float32 [n, in]."""
        return torch.cat(self.rows).float()

    def scaled(self, factor: Tensor) -> InputStats:
        rows = [row.float() * factor for row in self.rows]
        return InputStats(self.magnitudes * factor, self.peaks * factor, self.energy * factor.square(), rows)


@dataclass
class LinearStats:
    """Second moments of a linear layer's input over the calibration tokens (sequential mode)."""

    tokens: int
    squares: Tensor  # float32 [in], the Hessian's diagonal: sum over tokens of x_i^2, times importance if any
    hessian: Tensor | None  # float32 [in, in], X^T X summed over tokens; None where only norms were asked for
    inputs: InputStats | None = None  # where they were asked for
    # What ranks the layer's output rows: what an output's mean squared error is worth, float32 [out], or what every row
    # costs at widths 1 to 8, float32 [out, 8], whatever its error. None: all errors are worth 1.
    outputs: Tensor | None = None

    @staticmethod
    def empty(
        in_features: int, hessian: bool, device: torch.device | str = "cpu", inputs: bool = False
    ) -> LinearStats:
        square = torch.zeros(in_features, in_features, device=device) if hessian else None
        more = InputStats.empty(in_features, device) if inputs else None
        return LinearStats(0, torch.zeros(in_features, device=device), square, more)

    def scaled(self, factor: Tensor) -> LinearStats:
        """The statistics of inputs times `factor` [in]."""
        hessian = None if self.hessian is None else self.hessian * factor[:, None] * factor
        more = None if self.inputs is None else self.inputs.scaled(factor)
        return replace(self, squares=self.squares * factor.square(), hessian=hessian, inputs=more)

    def add(self, x: Tensor, importance: Tensor | None = None) -> None:
        """Accumulate inputs x [..., in], each token's moments times its importance [tokens] where given."""
        x = x.detach().reshape(-1, x.shape[-1])
        self.tokens += x.shape[0]
        if self.inputs is not None:
            self.inputs.add(x)
        if importance is not None:
            x = x.float() * importance.sqrt()[:, None]
        if self.hessian is None:
            self.squares += x.float().square().sum(0)
        else:
            dispatch.add_moments(self.hessian, x)
            self.squares = self.hessian.diagonal()

    def check(self, name: str) -> None:
        """Refuse statistics that no method can use.

        Raises:
            InputError: activations that overflowed or are NaN.
        """
        if not torch.isfinite(self.squares).all():
            raise InputError(
                f"{name}: its inputs hold NaN or Inf on the calibration text; is the checkpoint intact?"
            )


@dataclass
class GradientStats:
    """Gradient statistics of a linear layer (global mode: one backward pass per sample)."""

    samples: int
    tokens: int
    fisher: (
        Tensor | None
    )  # float32 [out, in], sum over samples of the squared weight gradient (diagonal Fisher)
    products: Tensor = field(default_factory=lambda: torch.empty(0))
    # float32 [deltas, samples, out]: gradient times perturbation of every output row (MixLLM eq. 4)
    output_moment: Tensor | None = (
        None  # float32 [out], sum over tokens of the squared gradient at the layer's output
    )
    diagonal: Tensor = field(default_factory=lambda: torch.empty(0))
    # float32 [deltas, out]: sum over samples and weights of (gradient * perturbation)^2
    token_moment: Tensor = field(default_factory=lambda: torch.empty(0))
    # float32 [samples, seq_len]: sum over outputs of the squared gradient at the layer's output

    def check(self, name: str) -> None:
        """Refuse statistics that no method can use.

        Raises:
            InputError: gradients that overflowed or are NaN.
        """
        given = [t for t in (self.fisher, self.output_moment, self.products, self.diagonal) if t is not None]
        if not all(torch.isfinite(t.sum()) for t in given):
            raise InputError(
                f"{name}: its gradients hold NaN or Inf on the calibration text; is the checkpoint intact?"
            )
