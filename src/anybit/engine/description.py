"""What the native decoder needs to know of a model, from its configuration and its small tensors.

One block with options covers these families. What a configuration says beyond them is refused by name: the model then
runs inside Transformers, slower and right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from anybit.config import Json
from anybit.errors import InputError
from anybit.formats.rope import ROPE_TYPES, frequencies, reached

MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text")
# Fields of a configuration that the description reads, those of all families first. A family's code in Transformers
# reads no others of these: what stands in its config.json all the same is another model's.
_ALL = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_theta",
    "rope_scaling", "tie_word_embeddings",
}  # fmt: skip
_QWEN2 = _ALL | {"hidden_act", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
_GEMMA2 = _ALL | {
    "hidden_activation", "attention_bias", "query_pre_attn_scalar", "sliding_window", "layer_types",
    "final_logit_softcapping", "attn_logit_softcapping",
}  # fmt: skip
READ = {
    "llama": _ALL | {"hidden_act", "attention_bias", "mlp_bias"},
    "mistral": _ALL | {"hidden_act", "sliding_window"},
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"attention_bias"},
    "smollm3": _ALL | {
        "hidden_act", "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window", "layer_types",
        "no_rope_layers", "no_rope_layer_interval",
    },
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2 | {"rope_local_base_freq", "sliding_window_pattern"},
}  # fmt: skip
# Fields that checkpoints of a family come with, and that its code does not read.
IDLE = {
    "gemma2": {"hidden_act", "sliding_window_size"}, "gemma3_text": {"hidden_act"}, "smollm3": {"max_window_layers"},
}  # fmt: skip
# Fields that change nothing of what a text's logits are, beside tokens' ids and those that begin with `_`.
INERT = {
    "architectures", "model_type", "transformers_version", "name_or_path", "dtype", "torch_dtype",
    "quantization_config", "initializer_range", "use_cache", "attention_dropout", "pretraining_tp", "return_dict",
    "output_hidden_states", "output_attentions", "attn_implementation", "cache_implementation", "is_llama_config",
    "rope_interleaved", "problem_type", "id2label", "label2id", "chunk_size_feed_forward",
    "transformers.js_config", "unsloth_fixed", "unsloth_version",
}  # fmt: skip
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Fields that change nothing where they are off: these, and those that another family reads.
OFF = {"use_bidirectional_attention", "is_encoder_decoder", "use_mrope"}.union(*READ.values())
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "relu": "relu",
}  # fmt: skip
GEMMAS = ("gemma2", "gemma3_text")  # whose norms are of 1 + weight, and stand behind attention and MLP, too
NORMED_HEADS = ("qwen3", "gemma3_text")  # whose queries and keys have norms of their own
KINDS_OF_LAYERS = (
    "qwen2",
    "qwen3",
    "smollm3",
    *GEMMAS,
)  # families whose layers may differ: `layer_types` says how

Tensors = Callable[[str], "np.ndarray | None"]  # a small tensor by name, float32; None: the model has none


class Unsupported(InputError):
    """A model that the native engine does not run; Transformers does."""


def check_computes(dtype: str, device: str) -> None:
    """Raise `Unsupported` for what the native engine does not compute in, or on."""
    if (dtype, device) != ("float32", "cpu"):
        raise Unsupported(f"dtype {dtype} on {device} (--dtype, --device); the engine has float32 on cpu")


def describe(config: Json, tensors: Tensors) -> Json:
    """The description that `_native.Decoder` takes.

    Args:
        config: of a causal language model, as Transformers writes it, with every field that matters: a default that is
            left out is not known here.
        tensors: its norms and biases.

    Raises:
        Unsupported: a family or a field that the engine does not know, or one that is missing.
    """
    family = config.get("model_type")
    check_family(family)
    own = {field: value for field, value in config.items() if field in READ[str(family)]}
    with _readable():
        return _described(own | {"model_type": family}, tensors)


def reach(config: Json) -> int | None:
    """How many tokens a text may have; None: the configuration does not say.

    Args:
        config: what `describe` takes.

    Raises:
        Unsupported: numbers that say no length.
    """
    with _readable():
        return reached(config["rope_parameters"], config["max_position_embeddings"])


@contextmanager
def _readable() -> Iterator[None]:
    """Say what a configuration lacks, or has of another kind than is read.

    Raises:
        Unsupported: in place of what reading it raised.
    """
    try:
        yield
    except KeyError as error:
        raise Unsupported(f"its config.json has no {error.args[0]}") from error
    except (TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        if isinstance(error, InputError):
            raise
        raise Unsupported(f"its config.json is not what the engine reads: {error}") from error


def check_family(family: object) -> None:
    """Refuse a `model_type` that the engine does not know.

    Raises:
        Unsupported: with those that it does.
    """
    if family not in FAMILIES:
        raise Unsupported(f"its family is {family!r}; the engine runs {', '.join(FAMILIES)}")


def refuse_unknown_fields(family: object, config: Json) -> None:
    """Refuse a family that the engine does not know, and fields that are not read of it.

    Args:
        family: `model_type`.
        config: without what is as its class has it.

    Raises:
        Unsupported: with the first of them.
    """
    check_family(family)
    known = READ[str(family)] | IDLE.get(str(family), set()) | INERT
    for field, value in config.items():
        if field.startswith("_") or field.endswith("_token_id"):
            continue
        if field not in known and not (field in OFF and not value):
            raise Unsupported(f"its config.json says {field} = {value!r:.60}, which the engine does not know")


def head_size(config: Json) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _check_numbers(config: Json) -> None:
    """Refuse sizes that are none: what they would make looks like damaged weights, or like no memory."""
    for field in SIZES:
        if type(config[field]) is not int or config[field] < 1:
            raise Unsupported(f"its config.json says {field} = {config[field]!r:.60}, expected 1 or more")
    stated, epsilon = config["max_position_embeddings"], config["rms_norm_eps"]
    if stated is not None and (type(stated) is not int or stated < 1):
        raise Unsupported(
            f"its config.json says max_position_embeddings = {stated!r:.60}, expected 1 or more"
        )
    if not 0 <= float(epsilon) < 1:
        raise Unsupported(f"its config.json says rms_norm_eps = {epsilon!r:.60}, expected 0 to 1")


def _described(config: Json, tensors: Tensors) -> Json:
    _check_numbers(config)
    ropes = _Ropes(config)
    blocks = [_block(config, i, ropes, tensors) for i in range(config["num_hidden_layers"])]
    gemma = config["model_type"] in GEMMAS
    return {
        "vocabulary": config["vocab_size"],
        "hidden": config["hidden_size"],
        "intermediate": config["intermediate_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_size": head_size(config),
        "activation": _activation(config),
        "epsilon": float(config["rms_norm_eps"]),
        "softmax_scale": float(config["query_pre_attn_scalar"] if gemma else head_size(config)) ** -0.5,
        "attention_softcap": _attention_softcap(config),
        "embedding_scale": float(config["hidden_size"]) ** 0.5 if gemma else 1.0,
        "logit_softcap": float(config.get("final_logit_softcapping") or 0),
        "final_norm": _norm(config, tensors, "model.norm"),
        "ropes": ropes.described,
        "blocks": blocks,
    }


def _activation(config: Json) -> str:
    name = config["hidden_activation" if config["model_type"] in GEMMAS else "hidden_act"]
    if name not in ACTIVATIONS:
        raise Unsupported(f"its activation is {name!r}; the engine has {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _attention_softcap(config: Json) -> float:
    """Gemma 3 has the field, too, and nothing that reads it."""
    return float(config.get("attn_logit_softcapping") or 0) if config["model_type"] == "gemma2" else 0.0


class _Ropes:
    """The rotary embeddings of a model: of all its layers, or of each kind of layers."""

    def __init__(self, config: Json) -> None:
        self._config = config
        self.described: list[Json] = []
        self._found: dict[str, int] = {}

    def of(self, layer_type: str) -> int:
        """The number of what layers of a type have."""
        asked = self._config["rope_parameters"]
        kind = layer_type if layer_type in asked else ""
        if kind not in self._found:
            rope = asked[kind] if kind else asked
            if rope["rope_type"] not in ROPE_TYPES:
                raise Unsupported(
                    f"its rotary embedding is of type {rope['rope_type']!r}; the engine has {', '.join(ROPE_TYPES)}"
                )
            if not 1 <= float(rope["rope_theta"]) < float("inf"):
                raise Unsupported(f"its rope_theta is {rope['rope_theta']!r:.60}, expected 1 or more")
            if rope.get("partial_rotary_factor", 1) != 1:
                raise Unsupported("its rotary embedding turns a part of each head only")
            self._found[kind] = len(self.described)
            size, positions = head_size(self._config), self._config["max_position_embeddings"]
            angles, scale = frequencies(rope, size, positions)
            self.described.append({"frequencies": angles, "scale": scale})
        return self._found[kind]


def _block(config: Json, index: int, ropes: _Ropes, tensors: Tensors) -> Json:
    family, name = config["model_type"], f"model.layers.{index}"
    layer_type = config["layer_types"][index] if family in KINDS_OF_LAYERS else "full_attention"
    if layer_type not in ("full_attention", "sliding_attention"):
        raise Unsupported(f"layer {index} is of type {layer_type!r}")
    windowed = layer_type == "sliding_attention" or family == "mistral"
    no_rope = config["no_rope_layers"] if family == "smollm3" else None
    made: Json = {
        "window": (config["sliding_window"] or 0) if windowed else 0,
        "rope": -1 if no_rope and not no_rope[index] else ropes.of(layer_type),
    }
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if family in GEMMAS:
        norms["post_attention_norm"] = norms["mlp_norm"]
        norms |= {"mlp_norm": "pre_feedforward_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
    made |= {key: _norm(config, tensors, f"{name}.{norm}") for key, norm in norms.items()}
    if family in NORMED_HEADS:
        made["q_norm"] = _norm(config, tensors, f"{name}.self_attn.q_norm")
        made["k_norm"] = _norm(config, tensors, f"{name}.self_attn.k_norm")
    for matrix in _biased(config):
        bias = tensors(f"{name}.{matrix}.bias")
        if bias is None:
            raise Unsupported(f"it has no {name}.{matrix}.bias")
        made[f"{matrix.rpartition('.')[2].removesuffix('_proj')}_bias"] = bias
    return made


def _biased(config: Json) -> tuple[str, ...]:
    """The matrices that have biases: a tensor that is missing is no bias left out."""
    if config["model_type"] == "qwen2":
        return MATRICES[:3]
    attention = MATRICES[:4] if config.get("attention_bias") else ()
    return attention + (MATRICES[4:] if config.get("mlp_bias") else ())


def _norm(config: Json, tensors: Tensors, name: str) -> np.ndarray:
    weight = tensors(f"{name}.weight")
    if weight is None:
        raise Unsupported(f"it has no {name}")
    return weight + np.float32(1) if config["model_type"] in GEMMAS else weight
