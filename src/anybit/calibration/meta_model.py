"""A model of Transformers without its weights, and which tensors of a checkpoint it is to be filled from."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from anybit.checkpoint.architectures import (
    auto_class,
    build_options,
    refuse_large_tables,
    refuse_more_weights,
)
from anybit.checkpoint.directory import Checkpoint
from anybit.errors import InputError


def meta_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The model on PyTorch's meta device: shapes without memory.

    Raises:
        InputError: a model that is quantized already, that Transformers does not know or cannot build; see also
            `refuse_large_tables`.
    """
    config = checkpoint.config
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(
            f"{checkpoint.source} is already quantized ({checkpoint.quantized_before()}): start from the "
            "full-precision model"
        )
    try:
        return build(checkpoint, dtype)
    except InputError:
        raise
    except Exception as error:  # what impossible sizes make of each model class has no common base class
        cause = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        if "Unrecognized configuration class" in cause:
            raise InputError(
                f"{checkpoint.source}: {config.model_type!r} is neither a causal language model nor an encoder that "
                f"Transformers knows; anybit compresses those ({cause})"
            ) from error
        raise InputError(
            f"{checkpoint.source}: its configuration does not describe a {config.model_type} that can be built "
            f"({cause}); use the config.json that belongs to the weights"
        ) from error


def build(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The model on PyTorch's meta device, whatever its config says of quantization.

    Raises:
        Exception: whatever a configuration makes of its model class; see also `refuse_large_tables` and
            `refuse_more_weights`.
    """
    config = copy.deepcopy(checkpoint.config)  # building a model writes its dtype there
    with torch.device("meta"):
        options = build_options(config, checkpoint.names())
        source = auto_class(config)
        model = source.from_config(config, dtype=dtype, trust_remote_code=False, **options).eval()
    refuse_large_tables(checkpoint.source, model, checkpoint.weight_bytes())
    if getattr(config, "quantization_config", None) is None:  # else shapes are held against its descriptions
        refuse_more_weights(checkpoint.source, model, checkpoint.weights())
    return model


def find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """The list of transformer blocks: the one ModuleList with as many entries as the config has layers.

    Of several, such as a vision tower's beside the text's, the first that the model of the text has.
    """
    text = model.config.get_text_config()
    layers = text.num_hidden_layers
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == layers
    }
    for name, module in found.items():
        if nearest_model(model, name).config.model_type == text.model_type:
            return name, module
    for name, module in found.items():
        return name, module
    raise InputError(
        f"{model.config.model_type}: found no list of {layers} transformer blocks: unsupported architecture"
    )


def nearest_model(model: Any, name: str) -> Any:
    """The innermost of the models in a model, such as its vision tower, that a module belongs to."""
    found = part = model
    for step in name.split(".") if name else ():
        part = part.get_submodule(step)
        found = part if isinstance(part, PreTrainedModel) else found
    return found


def refuse_fused_experts(model: Any, blocks: nn.ModuleList) -> None:
    """Refuse a mixture of experts whose matrices are one parameter: there is no `nn.Linear` to quantize."""
    for name, parameter in blocks.named_parameters():
        if parameter.ndim >= 3 and "conv" not in name:
            raise InputError(
                f"{model.config.model_type} fuses its experts into one parameter ({name}, {list(parameter.shape)}): "
                "mixture-of-experts models are not supported yet"
            )


def checkpoint_names(model: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """Model tensor name -> checkpoint tensor name; tied heads that the checkpoint leaves out are absent.

    Raises:
        InputError: tensors missing from the checkpoint or of another shape than the config says.
    """
    prefix = model.base_model_prefix + "."
    tied = set(model.all_tied_weights_keys)
    renamed, names = _renamed(model, checkpoint), {}
    for name, tensor in model.state_dict().items():
        candidates = (name, name.removeprefix(prefix), prefix + name)
        found = next((renamed[c] for c in candidates if c in renamed), None)
        if name in tied:
            continue
        if found is None:
            raise InputError(
                f"{checkpoint.source} has no tensor {name!r}, which its config ({model.config.model_type}) asks for: "
                "the checkpoint is incomplete, or its layout is not supported"
            )
        if tuple(checkpoint.shape(found)) != tuple(tensor.shape):
            raise InputError(
                f"{found} has shape {list(checkpoint.shape(found))}, the config asks for {list(tensor.shape)}: "
                "config.json and the weights do not belong together"
            )
        if not checkpoint.dtype(found).is_floating_point and tensor.is_floating_point():
            raise InputError(
                f"{found} is stored as {checkpoint.dtype(found)}, expected a floating-point type: start from the "
                "full-precision model"
            )
        if checkpoint.dtype(found).is_floating_point and checkpoint.dtype(found).itemsize == 1:
            raise InputError(
                f"{found} is stored as {checkpoint.dtype(found)}, which is quantized already: start from the 16-bit "
                "model"
            )
        names[name] = found
    return names


def _renamed(model: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """Name as Transformers changes it at load -> checkpoint name: GPT-NeoX's `embed_out` is its `lm_head`."""
    renamings = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
    names = checkpoint.names()
    return {rename_source_key(n, renamings, [])[0]: n for n in names} | {n: n for n in names}
