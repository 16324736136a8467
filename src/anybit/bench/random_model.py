"""Models with random weights of the method `anybit`, packed directly: shapes to time without a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from anybit.bench.kernels import random_weight
from anybit.config import Json
from anybit.formats import NestedLayout
from anybit.formats.layout import LayerLayout
from anybit.formats.levels import Level
from anybit.formats.weight import PackedWeight
from anybit.layers import QuantEmbedding, QuantLinear, TiedHead, set_bits, set_codebook_precision

PREFIX = "random:"  # of a shape's name where a model is expected
_QWEN3: Json = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
# Model type and sizes. Two more shapes are of real models, which targets name.
SHAPES: dict[str, tuple[str, Json]] = {
    "Qwen3-0.6B": ("qwen3", _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072}),
    "Qwen3-1.7B": ("qwen3", _QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144}),
    "Llama-3.1-8B": (
        "llama",
        {
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
}
EIGHTH = 8  # rows of a plane come in multiples of


def random_config(shape: str) -> Any:
    """The configuration of a shape, a key of `SHAPES`."""
    kind, sizes = SHAPES[shape]
    return AutoConfig.for_model(kind, **sizes)


def random_model(config: Any, widths: Sequence[float]) -> Any:
    """A model as `anybit.load` makes it, in float32, with a level for each of some average widths.

    Matrices of one shape hold the same numbers, each in memory of its own, as caches go by addresses. Every matrix has
    the level's width, embedding and head too.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    swapped = _swap(model, max(widths))
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:  # norms, and biases
            owner, _, field = name.rpartition(".")
            ones = nn.Parameter(torch.ones(parameter.shape), requires_grad=False)
            setattr(model.get_submodule(owner), field, ones)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.levels = [_level(bits, swapped) for bits in sorted(widths)]
    model.kv_bits = 16
    model.set_bits = functools.partial(set_bits, model)
    model.set_codebook_precision = functools.partial(set_codebook_precision, model)
    return model.eval()


def _swap(model: Any, bits: float) -> dict[str, tuple[int, int]]:
    """Give the model random matrices; returns their shapes by name."""
    made: dict[tuple[int, int], PackedWeight] = {}
    swapped: dict[str, tuple[int, int]] = {}
    tied = model.config.tie_word_embeddings
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear | nn.Embedding) or (tied and module is head):
            continue
        out, columns = shape = module.weight.shape[0], module.weight.shape[1]
        layout = nested_layout(out, columns, bits)
        if shape not in made:
            made[shape] = random_weight(layout)
        with torch.device("meta"):
            if isinstance(module, nn.Embedding):
                scale = float(getattr(module, "scalar_embed_scale", 1.0))
                new: Any = QuantEmbedding(layout, scale, torch.float32)
            else:
                new = QuantLinear(layout, module.bias is not None)
        new.hold(PackedWeight(layout, {field: t.clone() for field, t in made[shape].tensors.items()}))
        model.set_submodule(name, new)
        swapped[name] = shape
    if tied:
        model.lm_head = TiedHead(model.get_input_embeddings())
    return swapped


def nested_layout(out: int, columns: int, bits: float) -> LayerLayout:
    """A nested matrix [out, columns] of an average width: full planes, and one of part of the rows."""
    full = int(bits)
    part = round((bits - full) * out / EIGHTH) * EIGHTH
    counts = [out] * full + [part] * (part > 0)
    return LayerLayout((out, columns), (NestedLayout.of(counts, columns // 128, gains=True, kept_bits=8),))


def _level(bits: float, shapes: dict[str, tuple[int, int]]) -> Level:
    layouts = {name: nested_layout(*shape, bits) for name, shape in shapes.items()}
    return Level(float(bits), sum(layout.nbytes for layout in layouts.values()), None, layouts)
