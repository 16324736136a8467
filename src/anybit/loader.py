"""Load a model of any kind: an artifact, an HF directory, a hub id or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

import anybit.integrations.transformers  # noqa: F401 - registers the quantizer
from anybit.artifact.files import SECTION, is_artifact
from anybit.artifact.levels import Budget, Levels
from anybit.artifact.reader import Artifact, open_artifact, refuse_unfinished
from anybit.calibration.gradients import load_whole
from anybit.calibration.meta_model import build
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.architectures import auto_class, build_options, refuse_unusable, refuse_unused
from anybit.checkpoint.configuration import plain_outputs
from anybit.checkpoint.directory import Checkpoint, open_checkpoint
from anybit.checkpoint.tokenizer import read_tokenizer
from anybit.errors import InputError, refuse_unknown
from anybit.formats.layout import QUANT_METHOD
from anybit.kernels.cpu_layer import check_precision
from anybit.kernels.dispatch import check_device
from anybit.layers import set_codebook_precision
from anybit.progress import SILENT, Silent

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    model: str | Path,
    *,
    codebook_precision: str = "fp16",
    dtype: str = "float32",
    device: str = "cpu",
    report: Silent = SILENT,
    **at: Unpack[Budget],
) -> Any:
    """A Transformers model, ready to run, from an artifact, an HF directory, a hub id or a `.gguf` file.

    Args:
        model: what to load; an artifact's headers, shapes and indices are checked first.
        codebook_precision: "int8" runs codebooks by row (SqueezeLLM, Any-Precision) and nested matrices (anybit) on
            the CPU faster, with inputs and centroids rounded to 8 bits; `model.set_codebook_precision(p)` changes it.
        dtype: what it computes in ("float32", "bfloat16", "float16"); stored codes and scales keep theirs.
        device: "cpu" or "cuda".
        report: where progress goes.
        at: the budget of the level to run at: `bits` (average width), `bpw` (bits per weight of the linear layers, in
            memory) or `size` (bytes of all files but the tokenizer, or text such as "110MB"). Nothing beyond it is read
            from disk. Without it all levels are loaded. `model.set_bits(b)` changes the one that runs.

    Raises:
        InputError: see `artifact.open_artifact`, `checkpoint.open_checkpoint`; an unknown dtype, device or precision.
    """
    refuse_unknown(at, Budget)
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    check_device(device)
    check_precision(codebook_precision)
    path = Path(model)
    refuse_unfinished(path)
    if is_artifact(path):
        made = _load_artifact(Levels(open_artifact(path)), at, dtype, report)
        set_codebook_precision(made, codebook_precision)
        return made.eval().to(device)
    checkpoint = open_checkpoint(model)
    if checkpoint.gguf is None and is_artifact(checkpoint.path):  # from the hub
        how = {"codebook_precision": codebook_precision, "dtype": dtype, "device": device}
        return load(checkpoint.path, **how, report=report, **at)
    if any(value is not None for value in at.values()):
        raise InputError(
            f"{model} is no artifact of several widths: leave bits, bpw and size (--bits, ...) out"
        )
    if checkpoint.gguf is None:
        return _from_pretrained(checkpoint.path, dtype, checkpoint).eval().to(device)
    loaded = load_whole(StreamedModel(checkpoint, DTYPES[dtype]), report)
    return loaded.eval().to(device)


def _load_artifact(levels: Levels, at: Budget, dtype: str, report: Silent) -> Any:
    """An artifact at the level that was asked for; of what is beyond it nothing is read."""
    artifact, chosen = levels.artifact, levels.choose(**at)
    for note in levels.notes(at.get("bits"), chosen):
        report.say(note)
    level, found = levels.last if chosen is None else chosen, artifact.enhancements
    if found is None:
        if level == len(levels.sizes) - 1:
            return _from_pretrained(artifact.path, dtype, artifact.checkpoint)
        return _load_upto(artifact, levels.sizes[level].bits, dtype)
    config = artifact.checkpoint.config
    base = {key: value for key, value in artifact.quantization.items() if key != SECTION}
    config.quantization_config = base  # the base layer alone, an artifact like others
    model = _from_pretrained(artifact.path, dtype, artifact.checkpoint, config=config)
    model.hf_quantizer.extend(model, found, level)
    return model


def _load_upto(artifact: Artifact, bits: float, dtype: str) -> Any:
    """An artifact of several widths, those up to `bits`; of its other planes and tables nothing is read."""
    checkpoint, stored = artifact.checkpoint, artifact.stored.layers
    layers = {name: layout.upto(bits) for name, layout in stored.items()}
    wanted = {f"{n}.{f}": shape for n, x in layers.items() for f, (_, shape) in x.stored_tensors().items()}
    others = {f"{n}.{f}" for n, x in stored.items() for f in x.stored_tensors()} - wanted.keys()
    state = {
        name: checkpoint.read_beginning(name, wanted.get(name, checkpoint.shape(name)))
        for name in checkpoint.names()
        if name not in others
    }
    config = checkpoint.config
    described = {name: layout.to_json() for name, layout in layers.items()}
    config.quantization_config = {
        **artifact.quantization,
        "quant_method": QUANT_METHOD,
        "layers": described,
        "bits": bits,
    }
    model = _from_pretrained(None, dtype, checkpoint, config=config, state_dict=state)
    if (artifact.path / "generation_config.json").is_file():
        with _in_words(artifact.path):
            model.generation_config = GenerationConfig.from_pretrained(artifact.path)
    return model


def _from_pretrained(name: Path | None, dtype: str, checkpoint: Checkpoint, **given: Any) -> Any:
    """The model as Transformers loads it, refused where Transformers would make weights up.

    Raises:
        InputError: tensors that are missing or have another shape than config.json says; a config that
            describes no model.
    """
    path = checkpoint.path
    with _in_words(path), _without_report():
        build(checkpoint, DTYPES[dtype])  # costs nothing, and refuses what would fill memory
        source = auto_class(checkpoint.config)
        if name is None:  # tensors are given: the Auto class would look for files
            source = source._model_mapping[type(given["config"])]
        model, found = source.from_pretrained(
            name,
            dtype=DTYPES[dtype],
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, in a sentence
            output_loading_info=True,
            **build_options(checkpoint.config, checkpoint.names()),
            **given,
        )
    wrong = [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]
    if wrong:
        raise InputError(
            f"{path} lacks {sorted(wrong)[0]} in the shape that its config.json asks for, and {len(wrong) - 1} "
            "more tensors: config.json and the weights do not belong together"
        )
    refuse_unused(path, model, found["unexpected_keys"])
    refuse_unusable(path, model)
    for key, _ in model.named_parameters():
        if key in checkpoint and not (stored := checkpoint.dtype(key)).is_floating_point:
            raise InputError(
                f"{path}: {key} is stored as {stored}, expected a floating-point type: its file is damaged"
            )
    plain_outputs(model.config)
    return model


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Say what Transformers and torch raise of a model's files."""
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        raise InputError(f"{path} needs a package that is not installed: {_first_line(error)}") from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InputError(f"{path} does not fit into memory: give --dtype bfloat16, or free some") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {_first_line(error)}") from error
    except Exception as error:  # whatever an edited config.json makes Transformers and torch raise
        raise InputError(
            f"{path} does not load ({type(error).__name__}: {_first_line(error)}): "
            "its config.json or its files are damaged; copy it again"
        ) from error


@contextmanager
def _without_report() -> Iterator[None]:
    """Without what Transformers logs of tensors that do not fit, by their names as they are: a sentence says it."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def config_of(model: str | Path) -> PreTrainedConfig:
    """The configuration of a model of any kind; see `load` for what is refused."""
    return opened(model).config


def opened(model: str | Path) -> Checkpoint:
    refuse_unfinished(Path(model))
    return open_artifact(Path(model)).checkpoint if is_artifact(Path(model)) else open_checkpoint(model)


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer that belongs to a model of any kind."""
    refuse_unfinished(Path(model))
    if is_artifact(Path(model)):
        return read_tokenizer(str(model), model)
    return open_checkpoint(model).tokenizer()
