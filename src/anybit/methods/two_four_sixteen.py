"""2/4/16: 2- and 4-bit blocks of input channels in one matrix, sparse 16-bit outliers (10.1145/3676536.3676796).

`two_four_blocks` rounds a matrix so; `finetune` trains a block's codes, scales and outliers afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anybit.config import LayerSpec, Widths, option, within
from anybit.errors import InputError, about_layer
from anybit.methods.method import (
    SHARE,
    Attentive,
    Damped,
    Method,
    Start,
    Statistics,
    Work,
)

if TYPE_CHECKING:
    from torch import Tensor

    from anybit.calibration.stats import LinearStats
    from anybit.formats.layout import LayerLayout
    from anybit.formats.weight import QuantizedWeight
    from anybit.methods.finetune import Task
    from anybit.progress import Advance


def bits_eq10(wide: float, group_size: int) -> float:
    """The average width of 2/4/16 by its eq. 10: scales and zero points of 2-bit groups count, `wide` of all at 4 bits.

    2-bit groups have a 2-bit zero point and a 4-bit scale, over 16 rows a 4-bit zero point and a float16 scale.
    """
    return (1 - wide) * (2 + (2 + 4) / group_size + (4 + 16) / (16 * group_size)) + 4 * wide


ALIGNED_BITS = bits_eq10(0.25, 16)  # the average at which 2- and 4-bit blocks come three to one


@dataclass(frozen=True, kw_only=True)
class TwoFourSixteen(Attentive, Damped):
    name: ClassVar = "two-four-sixteen"
    widths_of: ClassVar = Widths(bits_eq10(0, 16), 4, fractional=True, compact=(ALIGNED_BITS,))
    sized_by: ClassVar = ("wide_groups",)

    group_size: int = option(
        16, "Input channels of a 2-bit group; 8 takes 2.91 bits or more.", expected="16 or 8",
        valid=lambda value: value >= 1,
    )  # fmt: skip
    clip: bool = option(True, "Search clipping ratios per group.", layer=True)
    wide_groups: float | None = option(
        None, "Share of blocks at 4 bits, instead of bits.", unset="0.25",
        **within(0, 1, "a share") | {"expected": "a share from 0 to 1 (0.1 is 10 %)"},
    )  # fmt: skip
    exclusive_outliers: float = option(
        0.002, "Share of weights kept in 16 bits, the largest at 2 bits.", layer=True, **SHARE
    )
    finetune: bool = option(
        False, "Train each block after quantizing it. Several times slower.", flag="--finetune"
    )
    finetune_epochs: int = option(
        6, "Most passes over the calibration windows per block.", **within(1, 1000, "a whole number")
    )

    def defaults(self) -> dict[str, Any]:
        share = self.wide_groups
        if share is None and self.bits is None and self.budget is None:
            share = 0.25
        bits = {} if share is None else {"bits": bits_eq10(share, self.group_size), "wide_groups": share}
        return super().defaults() | bits

    def check(self) -> None:
        super().check()
        implied = self.bits if self.wide_groups is None else bits_eq10(self.wide_groups, self.group_size)
        if abs((implied or 0) - (self.bits or 0)) > 1e-9:
            raise InputError(
                "wide_groups (--wide-groups) and bits (--bits) set the same thing: give one of them"
            )
        usual = TwoFourSixteen.finetune_epochs
        if not self.finetune and self.finetune_epochs != usual:
            raise InputError(
                "finetune_epochs (--finetune-epochs) says how long to finetune: add finetune (--finetune)"
            )
        if self.finetune and self.one_shot:
            raise InputError(
                "finetuning makes each block undo what the blocks before it lost, which one_shot (--one-shot) hides "
                "from it: give one of them"
            )
        if self.finetune and self.windows < 2:
            raise InputError(
                "finetuning trains on some windows and stops by others: raise samples (--samples) to 2 or more"
            )

    @property
    def epochs(self) -> int:
        return self.finetune_epochs if self.finetune else 0


def layout(spec: LayerSpec[TwoFourSixteen], shape: tuple[int, int]) -> LayerLayout:
    from anybit.methods import two_four_blocks

    return two_four_blocks.layout(spec, shape)


def quantize(weight: Tensor, stats: LinearStats | None, spec: LayerSpec[TwoFourSixteen]) -> QuantizedWeight:
    from anybit.methods import two_four_blocks

    return two_four_blocks.compensate(weight, stats, spec)[0]


def tune(
    task: Task, starts: Mapping[str, Start], options: TwoFourSixteen, advance: Advance
) -> tuple[dict[str, QuantizedWeight], list[float]]:
    """Quantize a block's linears (by their names in the block), and train them together."""
    from anybit.methods import finetune, two_four_blocks

    trainable = {}
    for name, start in starts.items():
        with about_layer(start.name):
            made = two_four_blocks.compensate(start.weight(), start.stats, start.spec)
        trainable[name] = finetune.Trainable(*made)
    return finetune.finetune(task, trainable, options.finetune_epochs, options.seed, advance)


METHOD = Method(
    TwoFourSixteen,
    title="Fast and Efficient 2-bit LLM Inference on GPU: 2/4/16-bit in a Weight Matrix with Asynchronous "
    "Dequantization",
    paper="10.1145/3676536.3676796",
    summary="2/4/16: 2- and 4-bit groups and sparse outliers at 16",
    compared="two-four-sixteen",
    quantize=quantize,
    layout=layout,
    statistics=lambda options: Statistics(norms=True, hessian=True, attention=options.attention_weights),
    work=lambda options: Work(sweeps=1, epochs=options.epochs),
    tune=tune,
)
