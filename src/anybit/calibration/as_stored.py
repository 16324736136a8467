"""A block as it will run: its linear layers with the weights that are stored, and inputs rounded where they will be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from anybit.formats.layout import LayerLayout
from anybit.formats.weight import PackedWeight, unpack
from anybit.kernels.reference import round_inputs


@contextmanager
def as_stored(
    linears: Mapping[str, nn.Module],
    layouts: Mapping[str, LayerLayout],
    tensors: Mapping[str, Tensor],
    device: torch.device,
) -> Iterator[None]:
    """For the length of a `with`, what the layers compute is what the artifact will; their weights stay replaced.

    Args:
        linears: `nn.Linear` and `Conv1D` by name.
        layouts: how each is read.
        tensors: stored ones, by layer and field; needed at the start only.
        device: of the weights.
    """
    hooks = []
    for name, layout in layouts.items():
        packed = _packed(name, layout, tensors, device)
        _overwrite_weight(linears[name], unpack(packed).dequantize())
        if packed.layout.rounds_inputs:
            hooks.append(linears[name].register_forward_pre_hook(_rounding_hook(packed)))
        del packed
    del tensors  # whoever called may have let go of them
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _packed(
    name: str, layout: LayerLayout, tensors: Mapping[str, Tensor], device: torch.device
) -> PackedWeight:
    """A layer's stored tensors among a shard's, as far as its layout reads them, on a device."""
    fields = layout.stored_tensors().items()
    return PackedWeight(
        layout, {f: tensors[f"{name}.{f}"][: shape[0]].to(device) for f, (_, shape) in fields}
    )


def _overwrite_weight(module: nn.Module, weight: Tensor) -> None:
    target = module.weight
    assert isinstance(target, Tensor)
    target.copy_(weight.T if isinstance(module, Conv1D) else weight)


def _rounding_hook(packed: PackedWeight) -> Any:
    """A forward pre-hook that rounds a layer's inputs as the artifact will; keeps none of its codes."""
    small = {
        f: t
        for f, t in packed.tensors.items()
        if f.endswith(("act_clip", "act_scales", "cols", "input_scale"))
    }
    grids = PackedWeight(packed.layout, small)
    return lambda module, args: (round_inputs(args[0], grids), *args[1:])
