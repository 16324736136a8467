"""Load a model of any kind, and measure it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import anybit.integrations.transformers  # noqa: F401 - registers the quantizer
from anybit import evaluation, texts
from anybit.artifact import inspect, is_artifact, open_artifact, refuse_unfinished
from anybit.calibrate import load_whole
from anybit.checkpoint import open_checkpoint
from anybit.errors import InputError
from anybit.progress import SILENT, Silent
from anybit.streaming import StreamedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_device(device: str) -> None:
    """Refuse a device that a model cannot be put on here.

    Raises:
        InputError: neither cpu nor cuda, or cuda where PyTorch finds none.
    """
    if device not in ("cpu", "cuda"):
        raise InputError(f"device {device!r}: expected cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda': PyTorch finds no CUDA here; use cpu")


def load(model: str | Path, *, dtype: str = "float32", device: str = "cpu", report: Silent = SILENT) -> Any:
    """A Transformers model, ready to run, from an artifact, an HF directory, a hub id or a `.gguf` file.

    Args:
        model: what to load; an artifact's headers, shapes and indices are checked first.
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
        open_artifact(path)
        return _from_pretrained(path, dtype).eval().to(device)
    checkpoint = open_checkpoint(model)
    if checkpoint.gguf is None:
        return _from_pretrained(checkpoint.path, dtype).eval().to(device)
    loaded = load_whole(StreamedModel(checkpoint, DTYPES[dtype]), report)
    return loaded.eval().to(device)


def _from_pretrained(path: Path, dtype: str) -> Any:
    """The model as Transformers loads it, refused where Transformers would make weights up.

    Raises:
        InputError: tensors that are missing or have another shape than config.json says; a config that
            describes no model.
    """
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=DTYPES[dtype],
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, in a sentence
            output_loading_info=True,
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
    return model


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer that belongs to a model of any kind."""
    refuse_unfinished(Path(model))
    if is_artifact(Path(model)):
        try:
            return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise InputError(
                f"{model} has no usable tokenizer ({_first_line(error)}): copy the base model's tokenizer files"
            ) from error
    return open_checkpoint(model).tokenizer()


def evaluate(  # noqa: PLR0913 - mirrors the command's options
    model: str | Path,
    *,
    text: str = "builtin-eval",
    seq_len: int = 2048,
    max_tokens: int | None = None,
    base: str | Path | None = None,
    tasks: tuple[str, ...] = (),
    tasks_dir: Path | None = None,
    limit: int | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    report: Silent = SILENT,
) -> dict[str, Any]:
    """Perplexity of a model on a text, its divergence from `base`, and zero-shot tasks.

    Returns:
        JSON-able: `perplexity`, `tokens` (scored), `seq_len`, `bits_per_weight` (None for a model that is no
        artifact), with `base` `kld_mean`, `kld_p99`, `top1_agreement`, and with `tasks` a table of accuracies.

    Raises:
        InputError: see `load`, `texts.read_text`, `evaluation.perplexity` and `lm_eval.prepare`.
    """
    check_device(device)
    prepared: Any = None
    if tasks:  # before the models load: a mistake here must not cost the figures that come first
        from anybit.integrations import lm_eval

        prepared = lm_eval.prepare(tasks, tasks_dir=tasks_dir, limit=limit)
    elif tasks_dir is not None or limit is not None:
        option = "tasks_dir" if tasks_dir is not None else "limit"
        raise InputError(f"{option} is for zero-shot tasks: name some with tasks (--tasks piqa,arc_easy)")
    tokenizer = load_tokenizer(model)
    content = texts.read_text(text)
    tokens = texts.token_ids(tokenizer, content)
    loaded = load(model, dtype=dtype, device=device, report=report)
    reference = load(base, dtype=dtype, device=device, report=report) if base is not None else None
    advance: Any = None

    def progress(done: int, total: int) -> None:
        nonlocal advance
        advance = advance or report.task(f"perplexity on {text}", total)
        advance(1)

    result = evaluation.perplexity(
        loaded,
        tokens,
        seq_len=seq_len,
        max_tokens=max_tokens,
        bos=texts.default_bos(tokenizer),
        base=reference,
        progress=progress,
    )
    for note in result.notes:
        report.say(note)
    figures = {"model": str(model), "text": text, **result.as_dict(), "dtype": dtype, "bits_per_weight": None}
    if is_artifact(Path(model)):
        made = inspect(Path(model))
        figures |= {key: made[key] for key in ("method", "bits", "bits_per_weight", "size_bytes")}
    if prepared is not None:
        figures["tasks"] = lm_eval.run_prepared(loaded, tokenizer, prepared, batch_size=8)
    return figures
