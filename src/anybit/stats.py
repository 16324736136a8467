"""Statistics of a linear layer's inputs and gradients, as methods receive them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.errors import InputError
from anybit.kernels import dispatch


@dataclass
class LinearStats:
    """Second moments of a linear layer's input over the calibration tokens (sequential mode)."""

    tokens: int
    squares: Tensor  # float32 [in], the Hessian's diagonal: sum over tokens of x_i^2, times importance if any
    hessian: Tensor | None  # float32 [in, in], X^T X summed over tokens; None where only norms were asked for

    @staticmethod
    def empty(in_features: int, hessian: bool, device: torch.device | str = "cpu") -> LinearStats:
        square = torch.zeros(in_features, in_features, device=device) if hessian else None
        return LinearStats(0, torch.zeros(in_features, device=device), square)

    def add(self, x: Tensor, importance: Tensor | None = None) -> None:
        """Accumulate inputs x [..., in], each token's moments times its importance [tokens] where given."""
        x = x.detach().reshape(-1, x.shape[-1])
        self.tokens += x.shape[0]
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
    products: (
        Tensor | None
    )  # float32 [samples, out], g_d^T delta of every output channel and sample (MixLLM eq. 5)
    output_moment: (
        Tensor | None
    )  # float32 [out], sum over tokens of the squared gradient at the layer's output

    def check(self, name: str) -> None:
        """Refuse statistics that no method can use.

        Raises:
            InputError: gradients that overflowed or are NaN.
        """
        given = [t for t in (self.fisher, self.output_moment) if t is not None]
        if not all(torch.isfinite(t.sum()) for t in given):
            raise InputError(
                f"{name}: its gradients hold NaN or Inf on the calibration text; is the checkpoint intact?"
            )
