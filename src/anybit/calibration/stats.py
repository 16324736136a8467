"""Statistics of a linear layer's inputs and gradients, as methods receive them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

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


@dataclass(frozen=True)
class ExpectedTokens:
    """How likely a model finds each token, float32 [vocabulary]: means over places in texts."""

    probability: Tensor  # E[p]
    variance: Tensor  # E[p (1 - p)]


@dataclass
class VocabularyStats:
    """What embedding and head do on some samples: sums over their tokens."""

    length: int  # tokens of a sample
    samples: Tensor  # float32 [1]: how many
    hidden: Tensor  # float32 [hidden, hidden]: sum of h h^T, h the head's inputs
    probability: Tensor  # float32 [vocabulary]: sum of p, the probabilities that the model gives
    squared: Tensor  # float32 [vocabulary]: sum of p^2
    # Sums of squared gradients of a sample's mean loss at what is looked up: of every place, float32 [hidden]; of all
    # places of a row together, float32 [vocabulary].
    gradient: Tensor
    read: Tensor

    FIELDS: ClassVar = ("samples", "hidden", "probability", "squared", "gradient", "read")

    @staticmethod
    def empty(
        vocabulary: int, hidden: int, length: int, device: torch.device | str = "cpu"
    ) -> VocabularyStats:
        shapes = [(1,), (hidden, hidden), (vocabulary,), (vocabulary,), (hidden,), (vocabulary,)]
        return VocabularyStats(length, *(torch.zeros(shape, device=device) for shape in shapes))

    @staticmethod
    def of(tensors: Mapping[str, Tensor], length: int) -> VocabularyStats:
        return VocabularyStats(length, **{name: tensors[name] for name in VocabularyStats.FIELDS})

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.FIELDS}

    def add_head(self, hidden: Tensor, probabilities: Tensor) -> None:
        """Accumulate inputs [tokens, hidden] of the head and what it makes of them, [tokens, vocabulary]."""
        dispatch.add_moments(self.hidden, hidden)
        self.probability += probabilities.sum(0)
        self.squared += torch.linalg.vector_norm(probabilities, dim=0).square()

    def add_sample(self, tokens: Tensor, gradient: Tensor) -> None:
        """Accumulate a sample's tokens int64 [seq_len], and the gradient [seq_len, hidden] at their embeddings."""
        gradient = gradient.float()
        rows, places = tokens.unique(return_inverse=True)
        of_rows = gradient.new_zeros(len(rows), gradient.shape[1]).index_add_(0, places, gradient)
        self.samples += 1
        self.gradient += gradient.square().sum(0)
        self.read[rows] += of_rows.square().sum(1)

    def cost(self, read: bool, multiplied: bool, own: ExpectedTokens | None = None) -> VocabularyCost:
        """What errors cost of a matrix that is looked up, or multiplied with, or both.

        Which rows are looked up is known of few tokens: half of it is what the model expects. Half of all is what it
        expects in texts of its own, where these are given: few samples have few of the rows that these need.
        """
        samples = float(self.samples)
        scored = samples * (self.length - 1)
        nothing, expected = torch.zeros_like(self.read), self.probability / scored
        shares = self.read / self.gradient.sum().clamp(min=1e-30)
        looked_up = (shares + expected * shares.sum()) / 2
        variance = (self.probability - self.squared).clamp(min=0) / scored
        if own is not None:
            looked_up = (looked_up + own.probability * shares.sum()) / 2
            variance = (variance + own.variance) / 2
        return VocabularyCost(
            moment=self.hidden / scored,
            multiplied=variance if multiplied else nothing,
            gradient=self.gradient * (self.length / 2 / samples),
            read=looked_up if read else nothing,
        )


@dataclass(frozen=True)
class VocabularyCost:
    """What errors of the rows of an embedding, a head or a matrix that is both cost, in nats per token.

    An error e of row v, where the head multiplies with it, adds `h e` to a logit: with a second moment of
    `s = e E[h h^T] e^T`. To second order that costs `E[p (1 - p)] s / 2`, p being the probability of v. If s is not
    small, rows of little probability cost more, as they make the sum larger that logits are normalised by: for a
    Gaussian `h e` by a factor of `exp(s / 2)`. So the cost is `E[p (1 - p)] (exp(s / 2) - 1)`.

    Where row v is looked up, its error costs what errors at the outputs of linear layers do
    (`methods.sensitivity.output_moments`). But it is the same error at each place, so it is the gradients of all places
    in a sample together that count.
    """

    moment: Tensor  # float32 [hidden, hidden]: E[h h^T]
    multiplied: Tensor  # float32 [vocabulary]: E[p (1 - p)]; 0 of a matrix that is only looked up
    gradient: Tensor  # float32 [hidden]: what a squared error of what is looked up costs at every token
    read: Tensor  # float32 [vocabulary]: share of that which is due to a row; 0 of a head

    MOST: ClassVar = 30.0  # of s / 2: beyond, a row has no use anyway

    def hessian(self) -> Tensor:
        """Of a row's error, to second order, rows by their shares; float32 [hidden, hidden]."""
        return self.moment * (self.multiplied.sum() / 2) + torch.diag(self.gradient * self.read.sum())

    def of(self, errors: Tensor, rows: slice) -> Tensor:
        """Of errors float32 [r, hidden] of these rows, float32 [r]."""
        half = ((errors @ self.moment.to(errors.device)) * errors).sum(1) / 2
        multiplied, read = (share[rows].to(errors.device) for share in (self.multiplied, self.read))
        found = multiplied * half.clamp(0, self.MOST).expm1()
        return found + read * (errors.square() @ self.gradient.to(errors.device))
