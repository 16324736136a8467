"""Artifacts, damaged with their hashes made anew, at every door."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

import anybit
from anybit.checkpoint.files import HASHES
from tests.fuzz import mutate
from tests.fuzz.bases import ARTIFACTS, ENCODERS, Bases
from tests.fuzz.doors import SPEAKING, check_run, command, plain_transformers, refusals
from tests.fuzz.limits import Finding

LARGE = 1e6  # weights beyond it, which are finite, may well make numbers that are not
QUIET = ("--max-new-tokens", "2")
COMMANDS: dict[str, Callable[[Path, tuple[object, ...]], str]] = {  # of an artifact, and what `eval` is told
    "verify": lambda path, on: command("verify", path),
    "inspect": lambda path, on: command("inspect", path),
    "inspect json": lambda path, on: command("inspect", path, "--json", "-"),
    "plan": lambda path, on: command("plan", path),
    "generate": lambda path, on: command("generate", path, "-p", "the fox", *QUIET),
    "chat": lambda path, on: command("chat", path, *QUIET, stdin="hello\n"),
    "eval": lambda path, on: command("eval", path, *on),
}


def case(rng: Random, bases: Bases, folder: Path) -> str:
    name = rng.choice(list(bases.artifacts))
    path = Path(shutil.copytree(bases.artifacts[name], folder / "given" / name))
    door = rng.choice((*COMMANDS, "load", "load", "level", "transformers", "transformers"))
    if rng.random() < 0.1:
        how, good = mutate.harmless(rng, path), True
        none = (door == "level" and name != "anybit") or (door in SPEAKING and ARTIFACTS[name][0] in ENCODERS)
        door = "load" if none else door
    else:
        how, good = damage(rng, path, door == "transformers"), False
    if good or rng.random() < 0.8:
        mutate.rehash(path)
    print(f"{name}, {how}, {door}")
    outcome = (
        COMMANDS[door](path, bases.measured(name))
        if door in COMMANDS
        else loaded(rng, bases, name, path, door, good)
    )
    if good and outcome != "right":
        raise Finding(f"{how} is refused")
    return outcome


def damage(rng: Random, path: Path, only_ours: bool) -> str:
    """Damage a file of an artifact; `only_ours`: none that Transformers reads before anybit is asked."""
    files = sorted(file for file in path.iterdir() if file.is_file())
    shards = [file for file in files if file.suffix == ".safetensors"]
    texts = [file for file in files if file not in shards and (not only_ours or file.name == HASHES)]
    kind = rng.choice(("shard", "shard", "shard", "config", "config", "text", "text", "file"))
    if kind == "shard":
        return mutate.damage_shard(rng, rng.choice(shards))
    if kind == "config" and (only_ours or rng.random() < 0.4):
        return mutate.damage_part(rng, path / "config.json", "quantization_config")
    if kind == "config":
        return mutate.damage_text(rng, path / "config.json")
    if kind == "text":
        return mutate.damage_text(rng, rng.choice(texts))
    if rng.random() < 0.1:
        (path / "adapter_config.json").write_text('{"base_model_name_or_path": "/etc", "peft_type": "LORA"}')
    return mutate.damage_file(rng, rng.choice(shards if only_ours else files))


def loaded(rng: Random, bases: Bases, name: str, path: Path, door: str, good: bool) -> str:
    """Through the Python API: a refusal, or a model that computes what its bytes say."""
    with refusals() as refused:
        if door == "transformers":
            model = plain_transformers(path)
        elif door == "level":
            model = anybit.load(path, bits=8 if good else rng.choice((2, 2.5, 3.3, 4, 5, 8)))
        else:
            model = anybit.load(path)
        if model is None:
            return "error"
        logits = check_run(model)
        if good and door != "level" and not torch.equal(logits, bases.logits[name]):
            raise Finding("harmless, but the logits differ")
        if not logits.isfinite().all() and all(p.abs().max() < LARGE for p in model.parameters()):
            raise Finding("the logits are not finite")
        if len(model.levels) > 1 and rng.random() < 0.5:
            model.set_bits(rng.choice([level.bits for level in model.levels]))
            check_run(model)
    return "error" if refused else "right"
