"""PyTorch's attention, computed by what is faster on this CPU: many tokens in bfloat16, and one of several heads.

PyTorch multiplies bfloat16 as if it were float32 where there is AVX512-BF16 without AMX, which is 40 % of a forward
pass of 1024 tokens of a small model. Scores and sums are float32 either way, and weights bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from anybit.kernels import cpu


class QuickAttention(TorchFunctionMode):
    """Within this context `scaled_dot_product_attention` takes the quicker way; all else is as it was."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and not torch.compiler.is_compiling():
            return attention(*args, **kwargs)
        return func(*args, **kwargs)


def attention(  # noqa: PLR0913 - the signature of PyTorch's
    query: Tensor,  # [n, heads, T, d]
    key: Tensor,  # [n, key heads, S, d]
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """See `torch.nn.functional.scaled_dot_product_attention`."""
    plain = attn_mask is None and dropout_p == 0 and query.device.type == "cpu" and query.ndim == 4
    shared = enable_gqa and key.ndim == 4 and key.shape[1] < query.shape[1]
    if plain and is_causal and _multiplies(query, key, value, shared):
        out: Tensor = _Causal.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
        return out
    if plain and not is_causal and shared and query.shape[2] == 1:
        # PyTorch reads a key head once for each query head: here these are so many positions of one head
        packed = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        return scaled_dot_product_attention(packed, key, value, scale=scale).reshape(*query.shape[:-1], -1)
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def multiplies_bfloat16() -> bool:
    """Whether causal attention in bfloat16 is quicker here than PyTorch's, which multiplies with AMX where it can."""
    return cpu.has_bfloat16_dot() and not torch.cpu._is_amx_tile_supported()


def _multiplies(query: Tensor, key: Tensor, value: Tensor, shared: bool) -> bool:
    """Whether `cpu.causal_attention` takes these and is quicker."""
    if {x.dtype for x in (query, key, value)} != {torch.bfloat16} or not multiplies_bfloat16():
        return False
    n, heads, tokens, size = query.shape
    key_heads = key.shape[1] if shared and heads % key.shape[1] == 0 else heads
    same = key.shape == value.shape == (n, key_heads, tokens, size)
    return same and size % 2 == 0 and size <= cpu._native.MOST_HEAD_SIZE


class _Causal(torch.autograd.Function):
    """`cpu.causal_attention` forward, PyTorch's own backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # neither way takes numbers of a head that do not lie side by side
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        out, sums = cpu.causal_attention(query, key, value, scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        n, heads, tokens, size = query.shape
        shared = heads // key.shape[1]
        repeated = [x.repeat_interleave(shared, 1) for x in (key, value)]
        of_query, *others = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradients[0], query, *repeated, out, sums, 0.0, True, scale=ctx.scale
        )
        return of_query, *(x.view(n, -1, shared, tokens, size).sum(2) for x in others), None
