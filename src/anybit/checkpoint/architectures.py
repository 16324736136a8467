"""Which kind of model a checkpoint is: a causal language model, or an encoder such as BERT."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from anybit.config import SEQ_LEN
from anybit.errors import InputError
from anybit.formats.rope import reached

# Siblings that take the same input, which engines join into one matrix.
JOINED = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"))
# Tensors that some checkpoints hold and no model needs: tables that it computes, masks, what predicts further tokens.
NEEDLESS = (
    *(
        r"(^|\.)inv_freq$",
        r"(^|\.)position_ids$",
        r"(^|\.)attn\.(masked_)?bias$",
        r"(^|\.)attention\.(masked_)?bias$",
    ),
    *(r"(^|\.)rope_freqs(\.|$)", r"^(model\.)?mtp\."),
)
# Of encoders also their pretraining heads.
HEADS = (r"^(cls|lm_head|vocab_\w+|generator_\w+|discriminator_\w+|mlm\w*)\.", r"(^|\.)pooler\.")
TABLES = 2**30  # bytes that a model may compute besides its weights, however small these are
WEIGHTS = 1 << 24  # that a model may make up before anybody looks at what is missing
PRETRAINING_HEADS = ("ForMaskedLM", "ForPreTraining")  # an encoder is used without them


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether a configuration describes a bidirectional encoder, which has embeddings and no next token."""
    bidirectional = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return bidirectional and not (getattr(config, "is_decoder", False) or config.is_encoder_decoder)


def auto_class(config: PreTrainedConfig) -> Any:
    """The Transformers Auto class that a checkpoint is built and loaded with.

    Raises:
        InputError: an encoder with a head for a task, which `AutoModel` would drop.
    """
    if not is_encoder(config):
        return AutoModelForCausalLM
    for name in config.architectures or ():
        headed = re.fullmatch(r"(\w+?)For[A-Z]\w+", name)
        if headed and not name.endswith(PRETRAINING_HEADS):
            raise InputError(
                f"{name} is an encoder with a head for one task, which anybit does not keep: it compresses encoders "
                f"for their embeddings; save the encoder alone ({headed[1]}Model) and compress that"
            )
    return AutoModel


def unused(model: Any, names: Iterable[str]) -> list[str]:
    """Of tensors that a checkpoint holds and a model has no place for, those that are no known exception.

    The exceptions: `NEEDLESS`, those of the model's class in Transformers, heads that are tied, and pretraining heads
    of encoders.
    """
    patterns = [*NEEDLESS, *(model._keys_to_ignore_on_load_unexpected or ())]
    patterns += HEADS if is_encoder(model.config) else ()
    known = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    return [name for name in names if not known.search(name) and name not in model.all_tied_weights_keys]


def refuse_unused(source: Any, model: Any, names: Iterable[str]) -> None:
    """Refuse a checkpoint of which a part would be left out: it is another model than its config.json says.

    Raises:
        InputError: the first of the tensors that are `unused`.
    """
    if found := sorted(unused(model, names)):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise InputError(
            f"{source} holds {found[0]}{more}, which a {model.config.model_type} of its config.json has no place for: "
            "use the config.json that belongs to the weights"
        )


def refuse_unusable(source: Any, model: Any) -> None:
    """Refuse weights that cannot be computed with.

    Raises:
        InputError: a parameter that holds whole numbers, NaN or Inf.
    """
    for name, tensor in model.named_parameters():
        if tensor.is_meta:
            continue
        if not tensor.is_floating_point():
            raise InputError(
                f"{source}: {name} is stored as {tensor.dtype}, expected a floating-point type: its file is damaged"
            )
        # A finite sum proves that all values are finite, at a fraction of the exact test's cost.
        if not tensor.detach().sum().isfinite() and not tensor.isfinite().all():
            raise InputError(f"{source}: {name} holds NaN or Inf: its file is damaged")


def refuse_large_tables(source: Any, model: Any, held: int) -> None:
    """Refuse a model that would fill memory with what no file holds: tables of positions, masks.

    Args:
        source: the model, as errors name it.
        model: on PyTorch's meta device.
        held: bytes of its weights, in its files.

    Raises:
        InputError: the largest table, where all of them take more than the weights and more than 1 GiB.
    """
    made = {
        f"{parent}.{name}".lstrip("."): buffer.nbytes
        for parent, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    }
    if (total := sum(made.values())) > max(held, TABLES):
        largest = max(made, key=made.__getitem__)
        raise InputError(
            f"{source}: its config.json asks for tables of {total} bytes, such as {largest}, but the files hold only "
            f"{held}: use the config.json that belongs to them"
        )


def refuse_more_weights(source: Any, model: Any, held: int) -> None:
    """Refuse a model of far more weights than its files hold: Transformers would make them up, and fill memory.

    Args:
        source: the model, as errors name it.
        model: on PyTorch's meta device.
        held: weights in its files.

    Raises:
        InputError: more than twice as many (a head may be stored once and built twice), and more than costs nothing.
    """
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if wanted > 2 * held + WEIGHTS:
        raise InputError(
            f"{source}: its config.json asks for {wanted} weights, but the files hold only {held}: use the config.json "
            "that belongs to them"
        )


def lacks_pooler(config: PreTrainedConfig, tensors: Iterable[str]) -> bool:
    """Whether a checkpoint is of an encoder that has a pooler by default, and holds none: as roberta-base."""
    if not is_encoder(config) or any("pooler." in name for name in tensors):
        return False
    known = inspect.signature(AutoModel._model_mapping[type(config)].__init__).parameters
    return "add_pooling_layer" in known


def build_options(config: PreTrainedConfig, tensors: Iterable[str]) -> dict[str, Any]:
    """How a checkpoint's model is built besides its config: an encoder without the pooler that it does not hold."""
    return {"add_pooling_layer": False} if lacks_pooler(config, tensors) else {}


def max_positions(model: Any) -> int | None:
    """How many tokens a model reaches; None where its config does not say."""
    text = model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", getattr(text, "max_seq_len", None))  # MPT's name for it
    if any("rotary" in name for name, _ in model.named_modules()):  # a table of positions ends where it ends
        limit = reached(getattr(text, "rope_parameters", None) or {}, limit)
    if limit is None:
        return None
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    reserved = getattr(tables[0], "padding_idx", None) if tables else None
    return limit if reserved is None else limit - reserved - 1  # RoBERTa's begin behind the padding's


def usual_window(model: Any) -> int:
    """Tokens of a window where nobody says how many."""
    return min(SEQ_LEN, max_positions(model) or SEQ_LEN)


def joined_layers(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Layers by what engines join (q, k and v; gate and up), the others alone; in the order of first members."""
    found: dict[tuple[str, Any], list[str]] = {}
    for name in names:
        parent, _, own = name.rpartition(".")
        found.setdefault((parent, next((group for group in JOINED if own in group), own)), []).append(name)
    return [tuple(group) for group in found.values()]
