"""Models of the hub: fetched into the local cache, or found there."""

from __future__ import annotations

import re
from pathlib import Path

from anybit.checkpoint.files import ASSETS, HASHES, PICKLES, POOLING, TEMPLATES, cause
from anybit.errors import InputError


def download(model: str) -> Path:
    """Fetch a hub id into the local cache (or find it there): weights, configuration, tokenizer, licence."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    part = r"[A-Za-z0-9][\w.-]*"
    weights = (".gguf", ".safetensors", *(pattern[1:] for pattern in PICKLES))
    if not re.fullmatch(f"{part}(/{part})?", model, re.ASCII) or model.endswith(weights):
        raise InputError(
            f"{model} does not exist; give a model directory, a .gguf file or a hub id (owner/name)."
        )
    wanted = ["*.safetensors", "*.safetensors.index.json", "config.json", HASHES, POOLING, f"{TEMPLATES}/*"]
    wanted += ASSETS
    others = ["[!1a]*/*", "1_[!P]*/*", "a/*", "a[!d]*/*", "ad/*", "ad[!d]*/*"]  # folders but for these two
    unwanted = [*others, "consolidated*"]
    try:
        folder = snapshot_download(model, allow_patterns=wanted, ignore_patterns=unwanted)
    except GatedRepoError as error:
        raise InputError(
            f"{model} is gated: accept its terms on the hub, log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"{model} is neither a local path nor a model on the hub; check the spelling."
        ) from error
    except Exception as error:  # no network, a proxy, a full disk, a server's error: each with its own class
        raise InputError(
            f"{model} is no local path and could not be fetched from the hub ({cause(error)}); "
            "check the spelling and the network, or give a directory."
        ) from error
    return Path(folder)
