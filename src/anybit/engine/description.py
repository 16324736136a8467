"""What the native decoder needs to know of a model, from its configuration and its modules.

One block with options covers these families. What a configuration says beyond them is refused by name: the model then
runs inside Transformers, slower and right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anybit.config import Json
from anybit.errors import InputError
from anybit.formats.layout import LayerLayout
from anybit.kernels import cpu, cpu_layer
from anybit.layers import PackedModule, QuantEmbedding, TiedHead

if TYPE_CHECKING:
    from anybit import _native

MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
# Fields of a configuration that the description reads, here or as Transformers' modules have read them.
READ = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "max_position_embeddings", "rms_norm_eps",
    "rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq", "attention_bias", "mlp_bias",
    "tie_word_embeddings", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval", "query_pre_attn_scalar",
    "final_logit_softcapping", "attn_logit_softcapping",
}  # fmt: skip
# Fields that change nothing of what a text's logits are, beside tokens' ids and those that begin with `_`.
INERT = {
    "architectures", "model_type", "transformers_version", "name_or_path", "dtype", "torch_dtype",
    "quantization_config", "initializer_range", "use_cache", "attention_dropout", "pretraining_tp", "return_dict",
    "output_hidden_states", "output_attentions", "attn_implementation", "cache_implementation", "is_llama_config",
    "rope_interleaved", "problem_type", "id2label", "label2id", "chunk_size_feed_forward",
}  # fmt: skip
OFF = {"use_bidirectional_attention"}  # fields that change nothing where they are off
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "relu": "relu",
}  # fmt: skip
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text")
GEMMAS = ("gemma2", "gemma3_text")  # whose norms are of 1 + weight, and stand behind attention and MLP, too
# Rotary embeddings whose frequencies do not depend on the text's length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Unsupported(InputError):
    """A model that the native engine does not run; Transformers does."""


def describe(model: Any) -> Json:
    """The description that `_native.Decoder` takes.

    Args:
        model: a causal language model of Transformers, loaded in float32 on the CPU.

    Raises:
        Unsupported: a family, a field of its configuration or a module that the engine does not know.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        raise Unsupported(f"its family is {config.model_type!r}; the engine runs {', '.join(FAMILIES)}")
    _refuse_unknown_fields(config)
    ropes = _Ropes(model.model.rotary_emb)
    blocks = [_block(model, i, ropes) for i in range(config.num_hidden_layers)]
    attention = model.model.layers[0].self_attn
    return {
        "vocabulary": config.vocab_size,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_size": attention.head_dim,
        "activation": _activation(config),
        "epsilon": config.rms_norm_eps,
        "softmax_scale": float(attention.scaling),
        "attention_softcap": _attention_softcap(config),
        "embedding_scale": _embedding_scale(model),
        "residual_scale": 1.0,
        "logit_scale": 1.0,
        "logit_softcap": float(getattr(config, "final_logit_softcapping", None) or 0),
        "final_norm": _norm(model.model.norm),
        "ropes": ropes.described,
        "blocks": blocks,
    }


def _refuse_unknown_fields(config: Any) -> None:
    """Refuse what nobody here reads, where it is not as its class has it."""
    for field, value in config.to_diff_dict().items():
        if field.startswith("_") or field.endswith("_token_id"):
            continue
        known = field in READ or field in INERT or (field in OFF and not value)
        if not known:
            raise Unsupported(f"its config.json says {field} = {value!r:.60}, which the engine does not know")


def _activation(config: Any) -> str:
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in ACTIVATIONS:
        raise Unsupported(f"its activation is {name!r}; the engine has {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _attention_softcap(config: Any) -> float:
    """Gemma 3 has the field, too, and nothing that reads it."""
    return float(config.attn_logit_softcapping or 0) if config.model_type == "gemma2" else 0.0


def _embedding_scale(model: Any) -> float:
    embedding = model.get_input_embeddings()
    scale = (
        embedding.scale if isinstance(embedding, QuantEmbedding) else getattr(embedding, "embed_scale", 1.0)
    )
    return float(scale)


class _Ropes:
    """The rotary embeddings of a model: of all its layers, or of each kind of layers."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.described: list[Json] = []
        self._found: dict[str, int] = {}

    def of(self, layer_type: str) -> int:
        """The number of what layers of a type have."""
        prefix = f"{layer_type}_" if hasattr(self._module, f"{layer_type}_inv_freq") else ""
        if prefix not in self._found:
            kind = self._module.rope_type
            kind = kind[layer_type] if isinstance(kind, dict) else kind
            if kind not in ROPE_TYPES:
                raise Unsupported(
                    f"its rotary embedding is of type {kind!r}; the engine has {', '.join(ROPE_TYPES)}"
                )
            self._found[prefix] = len(self.described)
            self.described.append(
                {
                    "frequencies": getattr(self._module, f"{prefix}inv_freq").float().contiguous(),
                    "scale": float(getattr(self._module, f"{prefix}attention_scaling")),
                }
            )
        return self._found[prefix]


def _block(model: Any, index: int, ropes: _Ropes) -> Json:
    config, block = model.config, model.model.layers[index]
    attention = block.self_attn
    types = getattr(config, "layer_types", None)
    layer_type = types[index] if types else "full_attention"
    if layer_type not in ("full_attention", "sliding_attention"):
        raise Unsupported(f"layer {index} is of type {layer_type!r}")
    windowed = layer_type == "sliding_attention" or config.model_type == "mistral"
    no_rope = getattr(config, "no_rope_layers", None)
    made: Json = {
        "window": (config.sliding_window or 0) if windowed else 0,
        "rope": -1 if no_rope and not no_rope[index] else ropes.of(layer_type),
    }
    if config.model_type in GEMMAS:
        norms = {
            "before_attention": block.input_layernorm,
            "behind_attention": block.post_attention_layernorm,
            "before_mlp": block.pre_feedforward_layernorm,
            "behind_mlp": block.post_feedforward_layernorm,
        }
    else:
        norms = {"before_attention": block.input_layernorm, "before_mlp": block.post_attention_layernorm}
    norms |= {"of_queries": getattr(attention, "q_norm", None), "of_keys": getattr(attention, "k_norm", None)}
    made |= {name: _norm(norm) for name, norm in norms.items() if norm is not None}
    for matrix in MATRICES:
        bias = getattr(block.get_submodule(matrix), "bias", None)
        if bias is not None:
            made[f"{matrix.rpartition('.')[2].removesuffix('_proj')}_bias"] = (
                bias.detach().float().contiguous()
            )
    return made


def _norm(module: Any) -> Tensor:
    weight = module.weight.detach().float()
    return (1.0 + weight if type(module).__name__.startswith(("Gemma2", "Gemma3")) else weight).contiguous()


class Matrices:
    """A model's matrices as native layers, at each of its levels.

    Raises:
        Unsupported: a matrix without a native kernel.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        names = {module: name for name, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self._embedding, self._head = names[embedding], names[head]
        weight = getattr(embedding, "weight", None)
        if isinstance(head, TiedHead) or (weight is not None and weight is getattr(head, "weight", None)):
            self._head = self._embedding
        self._plain: dict[str, _native.Layer] = {}

    def at(
        self, layouts: Mapping[str, LayerLayout]
    ) -> tuple[_native.Layer, _native.Layer, list[list[_native.Layer]]]:
        """Embedding, head and the seven matrices of each block, as a level's layouts say."""
        blocks = [
            [self._layer(f"model.layers.{i}.{matrix}", layouts) for matrix in MATRICES]
            for i in range(len(self._model.model.layers))
        ]
        return self._layer(self._embedding, layouts), self._layer(self._head, layouts), blocks

    def release(self) -> None:
        """Let the model lose those weights that are not quantized, of which the layers hold their own."""
        held = {id(self._model.get_submodule(name).weight) for name in self._plain}
        for module in self._model.modules():  # a tied head holds the embedding's, too
            if id(getattr(module, "weight", None)) in held:
                module.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def _layer(self, name: str, layouts: Mapping[str, LayerLayout]) -> _native.Layer:
        module = self._model.get_submodule(name)
        if not isinstance(module, PackedModule):
            if name not in self._plain:
                self._plain[name] = _plain(name, module.weight.detach())
            return self._plain[name]
        bound = module.bound()
        layer = bound.at(layouts[name] if name in layouts else module.layout.widest()).layer
        if not isinstance(layer, cpu_layer.Layer):
            raise Unsupported(f"{name} has no native kernel here: {cpu.why_not() or 'its format has none'}")
        return layer.native


def _plain(name: str, weight: Tensor) -> _native.Layer:
    """A matrix of 16-bit numbers, which the checkpoint's values must be."""
    if weight.isnan().any():
        raise InputError(f"{name} holds NaN: the weights are damaged; copy them again")
    for dtype in (torch.bfloat16, torch.float16):
        narrow = weight.to(dtype)
        if torch.equal(narrow.to(weight.dtype), weight):
            layout = {"shape": list(weight.shape), "tiles": [{"format": "float16"}]}
            return cpu._native.Layer(layout, {"values": narrow.contiguous()})
    raise Unsupported(f"{name} holds numbers of more than 16 bits")


@contextmanager
def at_precision(model: Any, precision: str) -> Iterator[None]:
    """Let a model's codebooks have a precision from now on; where that fails, what they had before."""
    modules = [module for module in model.modules() if isinstance(module, PackedModule)]
    before = [module.codebook_precision for module in modules]
    for module in modules:
        module.codebook_precision = precision
    try:
        yield
    except BaseException:
        for module, had in zip(modules, before):
            module.codebook_precision = had
        raise


@contextmanager
def in_words() -> Iterator[None]:
    """Say what the native code refuses."""
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise Unsupported(f"its layers do not fit the engine: {error}") from error


def check_tokenizer(tokenizer: Any) -> Any:
    """What decodes a tokenizer's tokens.

    Raises:
        Unsupported: there is none, or it is none of the library tokenizers.
    """
    found = getattr(tokenizer, "backend_tokenizer", None)
    if found is None:
        raise Unsupported("its tokenizer is none of the library tokenizers, or was not given")
    return found


def levels(model: Any) -> list[tuple[float, Mapping[str, LayerLayout]]]:
    """Average width and layouts of each of a model's levels; of a model that is not quantized, one of 16 bits."""
    return [(level.bits, level.layouts) for level in getattr(model, "levels", ())] or [(16.0, {})]
