"""Load a model of any kind: an artifact, an HF directory, a hub id or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

import anybit.integrations.transformers  # noqa: F401 - registers the quantizer
from anybit.artifact.files import is_artifact
from anybit.artifact.reader import open_artifact, refuse_unfinished
from anybit.artifact.sizes import check_width, choose_rung
from anybit.calibration.gradients import load_whole
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.architectures import auto_class, build_options, refuse_unused
from anybit.checkpoint.directory import Checkpoint, open_checkpoint
from anybit.checkpoint.tokenizer import read_tokenizer
from anybit.errors import InputError
from anybit.formats.layout import QUANT_METHOD, at_width, stored_tensors
from anybit.kernels.dispatch import check_device
from anybit.layers import set_exact
from anybit.progress import SILENT, Silent

CLOSE_BITS = 0.02  # average widths that are called the same
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(  # noqa: PLR0913 - mirrors the command's options
    model: str | Path,
    *,
    bits: float | None = None,
    bpw: float | None = None,
    size: int | str | None = None,
    exact: bool = True,
    dtype: str = "float32",
    device: str = "cpu",
    report: Silent = SILENT,
) -> Any:
    """A Transformers model, ready to run, from an artifact, an HF directory, a hub id or a `.gguf` file.

    Args:
        model: what to load; an artifact's headers, shapes and indices are checked first.
        bits: the width to run at: any average width of an artifact of the method `anybit`, one of those of
            `any-precision`. Nothing beyond it is read from disk. Without it all widths are loaded, and
            `model.set_bits(b)` changes the one that runs.
        bpw: of an artifact of the method `anybit`: the most stored bits per weight of the linear layers, instead.
        size: the same in bytes of all files but the tokenizer, or as text such as "110MB".
        exact: False runs codebooks by row (SqueezeLLM, Any-Precision) on the CPU faster, with inputs and centroids
            rounded to 8 bits; `model.set_exact(e)` changes it.
        dtype: what it computes in ("float32", "bfloat16", "float16"); stored codes and scales keep theirs.
        device: "cpu" or "cuda".
        report: where progress goes.

    Raises:
        InputError: see `artifact.open_artifact`, `checkpoint.open_checkpoint`; an unknown dtype or device.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    check_device(device)
    path = Path(model)
    refuse_unfinished(path)
    if is_artifact(path):
        quantization, checkpoint = open_artifact(path)
        found, rung = choose_rung(path, quantization, checkpoint, bits, bpw, size)
        if found is not None:
            served = bits is not None and rung is not None and bits - found.rungs[rung].bits <= CLOSE_BITS
            if rung in (None, found.present - 1) and not served and (note := found.note()):
                report.say(note)
            if bits is not None and rung is not None and not served:
                report.say(f"runs at {found.rungs[rung].bits:.2f} bits, the largest width up to {bits:g}")
            config = checkpoint.config
            config.quantization_config = {**quantization, "rung": found.present - 1 if rung is None else rung}
            made = _from_pretrained(path, dtype, checkpoint, config=config)
        elif bits is None:
            made = _from_pretrained(path, dtype, checkpoint)
        else:
            made = _at_width(path, quantization, checkpoint, bits, dtype)
        set_exact(made, exact)
        return made.eval().to(device)
    checkpoint = open_checkpoint(model)
    if checkpoint.gguf is None and is_artifact(checkpoint.path):  # from the hub
        at: dict[str, Any] = {"bits": bits, "bpw": bpw, "size": size}
        return load(checkpoint.path, **at, exact=exact, dtype=dtype, device=device, report=report)
    if (bits, bpw, size) != (None, None, None):
        raise InputError(
            f"{model} is no artifact of several widths: leave bits, bpw and size (--bits, ...) out"
        )
    if checkpoint.gguf is None:
        return _from_pretrained(checkpoint.path, dtype, checkpoint).eval().to(device)
    loaded = load_whole(StreamedModel(checkpoint, DTYPES[dtype]), report)
    return loaded.eval().to(device)


def _at_width(
    path: Path, quantization: dict[str, Any], checkpoint: Checkpoint, bits: float, dtype: str
) -> Any:
    """A nested artifact at one width; of its other planes and tables nothing is read."""
    stored = quantization["layers"]
    if len(check_width(path, stored, bits)) < 2:
        return _from_pretrained(path, dtype, checkpoint)
    layers = {name: at_width(layout, bits) for name, layout in stored.items()}
    wanted = {f"{n}.{f}": shape for n, x in layers.items() for f, (_, shape) in stored_tensors(x).items()}
    others = {f"{n}.{f}" for n, x in stored.items() for f in stored_tensors(x)} - wanted.keys()
    state = {
        name: checkpoint.read_beginning(name, wanted.get(name, checkpoint.shape(name)))
        for name in checkpoint.names()
        if name not in others
    }
    config = checkpoint.config
    config.quantization_config = {
        **quantization,
        "quant_method": QUANT_METHOD,
        "layers": layers,
        "bits": bits,
    }
    model = _from_pretrained(None, dtype, checkpoint, config=config, state_dict=state)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _from_pretrained(name: Path | None, dtype: str, checkpoint: Checkpoint, **given: Any) -> Any:
    """The model as Transformers loads it, refused where Transformers would make weights up.

    Raises:
        InputError: tensors that are missing or have another shape than config.json says; a config that
            describes no model.
    """
    path = checkpoint.path
    try:
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
    wrong = [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]
    if wrong:
        raise InputError(
            f"{path} lacks {sorted(wrong)[0]} in the shape that its config.json asks for, and {len(wrong) - 1} "
            "more tensors: config.json and the weights do not belong together"
        )
    refuse_unused(path, model, found["unexpected_keys"])
    model.config.return_dict = (
        True  # whatever config.json says: what measures a model asks for logits by name
    )
    return model


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def config_of(model: str | Path) -> PreTrainedConfig:
    """The configuration of a model of any kind; see `load` for what is refused."""
    return opened(model).config


def opened(model: str | Path) -> Checkpoint:
    refuse_unfinished(Path(model))
    return open_artifact(Path(model))[1] if is_artifact(Path(model)) else open_checkpoint(model)


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer that belongs to a model of any kind."""
    refuse_unfinished(Path(model))
    if is_artifact(Path(model)):
        return read_tokenizer(str(model), model)
    return open_checkpoint(model).tokenizer()
