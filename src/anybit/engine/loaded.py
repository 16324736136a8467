"""A model that Transformers has loaded, as what an engine is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from anybit.engine.description import Unsupported, check_computes, refuse_unknown_fields
from anybit.engine.source import EMBEDDING, Layouts, Source, plain_layer
from anybit.formats.dtypes import Dtype
from anybit.kernels import cpu, cpu_layer
from anybit.layers import PackedModule, TiedHead

if TYPE_CHECKING:
    from anybit import _native


class LoadedModel(Source):
    """What `anybit.load` made in float32 on the CPU. It loses its weights to the engine once that has all of them."""

    def __init__(self, model: Any, tokenizer: Any, precision: str) -> None:
        """Let the model's codebooks have a precision.

        Raises:
            Unsupported: a configuration with fields that the engine does not know; a model of another type or device.
        """
        check_computes(str(model.dtype).removeprefix("torch."), model.device.type)
        self._model = model
        self.name = str(model.name_or_path or "the model")
        self.config = model.config.to_dict()
        refuse_unknown_fields(self.config.get("model_type"), model.config.to_diff_dict())
        self.tokenizer, self.kv_bits = tokenizer, getattr(model, "kv_bits", 16)
        stored = getattr(model, "generation_config", None)
        self.generation = {} if stored is None else stored.to_dict()
        self.levels = levels(model)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        weight = getattr(embedding, "weight", None)
        tied = isinstance(head, TiedHead) or (weight is not None and weight is getattr(head, "weight", None))
        names = {module: name for name, module in model.named_modules()}
        self.head = EMBEDDING if tied else names[head]
        self._plain: dict[str, _native.Layer] = {}
        self._before = {module: module.codebook_precision for module in self._packed()}
        for module in self._before:
            module.codebook_precision = precision

    def _packed(self) -> list[PackedModule]:
        return [module for module in self._model.modules() if isinstance(module, PackedModule)]

    def restore(self) -> None:
        """Let the model be as it came."""
        for module, precision in self._before.items():
            module.codebook_precision = precision

    def tensor(self, name: str) -> np.ndarray | None:
        try:
            found = self._model.get_parameter(name)
        except AttributeError:
            return None
        made: np.ndarray = found.detach().float().numpy()
        return made

    def layer(self, name: str, layouts: Layouts) -> _native.Layer:
        module = self._model.get_submodule(name)
        if not isinstance(module, PackedModule):
            if name not in self._plain:
                weight = module.weight.detach()
                self._plain[name] = plain_layer(f"{name}.weight", weight.numpy(), Dtype.of(weight.dtype))
            return self._plain[name]
        bound = module.bound()
        layer = bound.at(layouts[name] if name in layouts else module.layout.widest()).layer
        if not isinstance(layer, cpu_layer.Layer):
            raise Unsupported(f"{name} has no native kernel here: {cpu.why_not() or 'its format has none'}")
        return layer.native

    def release(self) -> None:
        held = {id(self._model.get_submodule(name).weight) for name in self._plain}
        for module in self._model.modules():  # a tied head holds the embedding's, too
            if id(getattr(module, "weight", None)) in held:
                module.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def levels(model: Any) -> list[tuple[float, Layouts]]:
    """Average width and layouts of each of a model's levels; of a model that is not quantized, one of 16 bits."""
    return [(level.bits, level.layouts) for level in getattr(model, "levels", ())] or [(16.0, {})]
