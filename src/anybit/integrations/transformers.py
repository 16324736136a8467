"""anybit as a quantizer of Transformers: `AutoModel...from_pretrained(OUT)` after `import anybit`."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from anybit.artifact.coded_planes import expand
from anybit.artifact.config_json import StoredLayers
from anybit.artifact.enhancements import Enhancements, levels_upto, read_enhancements
from anybit.artifact.files import SECTION
from anybit.checkpoint.architectures import lacks_pooler, refuse_unusable, refuse_unused
from anybit.checkpoint.files import HASHES
from anybit.checkpoint.safetensors import read_safetensors_header
from anybit.config import Json
from anybit.errors import InputError
from anybit.formats.layout import QUANT_METHOD, LayerLayout
from anybit.formats.levels import levels_of
from anybit.formats.validate import check_version, validate
from anybit.layers import (
    PackedModule,
    QuantEmbedding,
    QuantLinear,
    TiedHead,
    set_bits,
    set_codebook_precision,
)


class AnybitConfig(QuantizationConfigMixin):
    """`quantization_config` of an artifact: every key of its JSON is kept as it is.

    Keys: `format_version`, `method`, `bits`, `layers` {name: layout}, `embeddings` {name: layout}, `dense`
    {name: [out, in]} (linear layers stored as they are, which need nothing here), and what the artifact says of its
    making (`calibration`, `base`, `options`).
    """

    def __init__(self, **fields: Any) -> None:
        fields.pop("quant_method", None)
        check_version(fields.get("format_version"))
        StoredLayers.from_json("quantization_config", fields)
        self.quant_method = QUANT_METHOD
        self.__dict__.update({"layers": {}, "embeddings": {}, "dense": {}, **fields})

    def stored(self) -> StoredLayers:
        """How the model's matrices are stored."""
        return StoredLayers.from_json("quantization_config", self.__dict__)

    def to_dict(self) -> Json:
        return dict(self.__dict__)

    def to_diff_dict(self) -> Json:
        return self.to_dict()


class AnybitQuantizer(HfQuantizer):
    """Swaps the layers that the config lists for modules that hold their packed bytes."""

    requires_calibration = True  # an existing artifact is loaded; `anybit quantize` makes one

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        dtype, self.stored = model.dtype, self.quantization_config.stored()
        for name, layout in self.stored.layers.items():
            _swap_linear(model, name, layout, dtype)
        for name, layout in self.stored.embeddings.items():
            _swap_embedding(model, name, layout, dtype)
        _refuse_undescribed(model, self.stored)
        files = kwargs.get("checkpoint_files")
        if files is not None:  # None: tensors that were given
            _refuse_other_files(model, [Path(file) for file in files])
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        _align(model)
        refuse_unusable(model.name_or_path, model)
        for name, module in model.named_modules():
            if isinstance(module, PackedModule) and module.packed.tensors:
                validate(name, module.packed)
                packed = expand(name, module.packed)
                if packed.layout != module.layout:
                    module.hold(packed)
        model.levels = levels_of({name: layout.expanded() for name, layout in self.stored.layers.items()})
        self._describe(model)
        self._extend_by_all(model)
        model.set_bits = functools.partial(set_bits, model)
        model.set_codebook_precision = functools.partial(set_codebook_precision, model)
        model.kv_bits = getattr(self.quantization_config, "kv_bits", 16)
        return model

    def extend(self, model: Any, found: Enhancements, level: int) -> None:
        """Make a loaded base layer what it is with its enhancement layers up to a level.

        Raises:
            InputError: a file that is damaged or does not fit the layers.
        """
        found.check_base()
        counts = found.counts(level, threads=torch.get_num_threads())
        arrays: dict[str, dict[str, Any]] = {}
        for name, layout in found.layouts_at(counts[level]).items():
            if name in counts[level]:
                module = model.get_submodule(name)
                module.grow(layout)
                arrays[name] = {field: tensor.numpy() for field, tensor in module.packed.tensors.items()}
        found.read_all(counts, arrays, torch.get_num_threads())
        model.levels, config = levels_upto(found, counts), self.quantization_config
        self._describe(model)
        config.bits = model.levels[-1].bits
        config.__dict__.pop(SECTION, None)  # with its enhancement layers, it is no base layer any more

    def _describe(self, model: Any) -> None:
        """Let the config say how layers are stored in this model: `save_pretrained` writes it."""
        config = self.quantization_config
        for group in (config.layers, config.embeddings):
            group |= {name: model.get_submodule(name).layout.to_json() for name in group}

    def _extend_by_all(self, model: Any) -> None:
        """Add the enhancement layers that lie beside a base layer, all that are there."""
        stated = getattr(self.quantization_config, SECTION, None)
        if stated is None:
            return
        folder = Path(model.name_or_path)
        if not folder.is_dir():  # a hub id, of which Transformers has fetched the base layer
            folder = _fetch_enhancements(model, stated, self.stored)
        found = read_enhancements(folder, stated, self.stored)
        assert found is not None
        if note := found.note():
            warnings.warn(note, stacklevel=2)
        self.extend(model, found, found.present - 1)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def _fetch_enhancements(model: Any, stated: Json, stored: StoredLayers) -> Path:
    """Download the list and the files that it names, as far as they are there; returns their folder."""
    fetch = functools.partial(
        cached_file, model.name_or_path, revision=getattr(model.config, "_commit_hash", None)
    )
    index = fetch(HASHES)
    assert index is not None  # or an error says what is missing
    listed = read_enhancements(Path(index).parent, stated, stored)
    for entry in () if listed is None else listed.entries[1:]:
        if fetch(entry.file, _raise_exceptions_for_missing_entries=False) is None:
            break
    return Path(index).parent


def register() -> None:
    """Make Transformers know artifacts; does nothing the second time."""
    if QUANT_METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(QUANT_METHOD)(AnybitConfig)
        register_quantizer(QUANT_METHOD)(AnybitQuantizer)


def _refuse_undescribed(model: Any, stored: StoredLayers) -> None:
    """Refuse a config that lost layers: Transformers would give them random weights.

    Raises:
        InputError: a linear layer of a block that is neither quantized nor stored as it is.
    """
    described = {*stored.layers, *stored.unquantized}
    blocks = {match.group(1) for name in described if (match := re.match(r"(.+?)\.\d+\.", name))}
    for name, module in model.named_modules():
        inside = any(re.match(rf"{re.escape(prefix)}\.\d+\.", name) for prefix in blocks) or not described
        if inside and isinstance(module, nn.Linear | Conv1D) and name not in described:
            raise InputError(
                f"config.json says nothing of {name}, a linear layer of this model: quantization_config is damaged; "
                "copy the artifact again"
            )


def _refuse_other_files(model: Any, files: list[Path]) -> None:
    """Refuse files that are not all of the model: Transformers would fill in what lay in memory, or numbers by chance.

    Args:
        model: with its layers swapped, nothing loaded; a pooler that the files do not hold leaves it.
        files: what is to be loaded.

    Raises:
        InputError: damaged files; a tensor that is missing, or one too many; an adapter beside them.
    """
    folder = files[0].parent
    if (folder / "adapter_config.json").exists() or getattr(model.config, "transformers_weights", None):
        raise InputError(f"{folder} names other weights beside its own: copy the artifact again")
    found = {name for file in files for name in read_safetensors_header(file)}
    if lacks_pooler(model.config, found):
        model.pooler = None
    expected = set(model.state_dict())
    if missing := sorted(expected - found - set(model.all_tied_weights_keys)):
        raise InputError(
            f"{folder} lacks the tensor {missing[0]}, and {len(missing) - 1} more: the artifact is incomplete; copy it "
            "again"
        )
    refuse_unused(folder, model, found - expected)


def _align(model: nn.Module) -> None:
    """Move tensors to where such numbers may lie: Transformers maps files, whose headers end at any byte."""
    moved: dict[int, Any] = {}  # tied parameters stay tied
    for module in model.modules():
        held: Any
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.is_meta or tensor.data_ptr() % tensor.itemsize == 0:
                    continue
                if id(tensor) not in moved:
                    copy, is_parameter = tensor.detach().clone(), isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
                held[name] = moved[id(tensor)]


def _swap_linear(model: Any, name: str, layout: LayerLayout, dtype: torch.dtype) -> None:
    module = _module_to_swap(model, name, (nn.Linear, Conv1D))
    shape = tuple(module.weight.shape)
    _check_shape(name, layout, shape[::-1] if isinstance(module, Conv1D) else shape)
    with torch.device("meta"):
        model.set_submodule(name, QuantLinear(layout, getattr(module, "bias", None) is not None, dtype))
    parent = model.get_submodule(name.rpartition(".")[0])
    if not [*parent.parameters(recurse=False), *parent.buffers(recurse=False)]:
        parent._is_hf_initialized = True  # GPT-2 would initialise `c_proj.weight`, which is gone


def _swap_embedding(model: Any, name: str, layout: LayerLayout, dtype: torch.dtype) -> None:
    """Replace the input embedding, and with it a head that the checkpoint does not hold."""
    module = _module_to_swap(model, name, (nn.Linear, nn.Embedding))
    if isinstance(module, nn.Linear):
        _swap_linear(model, name, layout, dtype)
        return
    _check_shape(name, layout, (module.num_embeddings, module.embedding_dim))
    scale = float(getattr(module, "scalar_embed_scale", 1.0))
    with torch.device("meta"):
        embedding = QuantEmbedding(layout, scale, dtype)
    model.set_submodule(name, embedding)
    head = output_name(model)
    if head is not None and layout.tied:
        model.set_submodule(head, TiedHead(embedding))


def _module_to_swap(model: Any, name: str, kinds: tuple[type, ...]) -> Any:
    """The module that the artifact holds in quantized form."""
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise InputError(
            f"the artifact quantizes {name!r}, which a {model.config.model_type} does not have"
        ) from error
    if not isinstance(module, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise InputError(
            f"the artifact quantizes {name!r}, which is a {type(module).__name__}, not a {expected}"
        )
    return module


def _check_shape(name: str, layout: LayerLayout, shape: tuple[int, ...]) -> None:
    if layout.shape != shape:
        raise InputError(
            f"the artifact stores {name!r} as {list(layout.shape)}, its config.json makes it {list(shape)}: "
            "config.json and the weights do not belong together"
        )


def output_name(model: Any) -> str | None:
    """Name of the language-model head."""
    head = model.get_output_embeddings()
    return next((n for n, m in model.named_modules() if m is head), None) if head is not None else None


register()
