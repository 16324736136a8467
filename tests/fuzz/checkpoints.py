"""Models as they come from the hub, damaged, through `quantize` and the commands that run them."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import anybit
from anybit.artifact.verify import verify
from anybit.errors import raised_by_a_model
from tests.fuzz import mutate
from tests.fuzz.bases import ENCODERS, Bases
from tests.fuzz.doors import SPEAKING, check_run, command, refusals
from tests.fuzz.limits import Finding

RTN = ("--method", "rtn", "--bits", "4", "--group-size", "32")
GPTQ = ("--method", "gptq", "--bits", "3", "--group-size", "32", "--samples", "2", "--seq-len", "16")
DOORS = ("rtn", "rtn", "rtn", "gptq", "dry run", "dry run", "eval", "generate", "chat", "plan")


def case(rng: Random, bases: Bases, folder: Path) -> str:
    family = rng.choice(list(bases.models))
    path = Path(shutil.copytree(bases.models[family], folder / "given" / family))
    good = rng.random() < 0.1
    how = mutate.harmless(rng, path) if good else damage(rng, path)
    door = rng.choice(DOORS)
    if good and family in ENCODERS and door in SPEAKING:
        door = "eval"
    print(f"{family}, {how}, {door}")
    outcome = enter(door, path, folder, bases, family)
    if good and outcome != "right":
        raise Finding(f"{how} is refused")
    return outcome


def damage(rng: Random, path: Path) -> str:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    shards = [file for file in files if file.suffix == ".safetensors"]
    kind = rng.choice(("shard", "shard", "config", "config", "config", "text", "file"))
    if kind == "shard":
        return mutate.damage_shard(rng, rng.choice(shards))
    if kind == "config":
        return mutate.damage_text(rng, path / "config.json")
    if kind == "file":
        return mutate.damage_file(rng, rng.choice(files))
    return mutate.damage_text(rng, rng.choice([file for file in files if file not in shards]))


def enter(door: str, path: Path, folder: Path, bases: Bases, family: str) -> str:
    """Through a door: what is written is whole, or not there."""
    out = folder / "out"
    if door == "eval":
        return command("eval", path, *bases.measured(family))
    if door == "generate":
        return command("generate", path, "-p", "the fox", "--max-new-tokens", "2")
    if door == "chat":
        return command("chat", path, "--max-new-tokens", "2", stdin="hello\n")
    if door in ("plan", "dry run"):
        return (
            command("plan", path)
            if door == "plan"
            else command("quantize", path, "-o", out, *RTN, "--dry-run")
        )
    options = (*GPTQ, "--calibration", bases.text) if door == "gptq" else RTN
    outcome = command("quantize", path, "-o", out, *options)
    if outcome == "error" and out.exists():
        raise Finding("refused, but OUT is there")
    if outcome == "right":
        verify(out)
        try:
            with refusals() as refused:
                check_run(anybit.load(out))
        except Exception as error:
            if raised_by_a_model(error):  # methods without calibration never run it: docs/security.md
                print(f"the model does not run, nor does OUT: {error}")
                return "error"
            raise
        if refused:
            raise Finding(f"what was made does not load: {refused[0]}")
        published = [
            file for file in out.rglob("*") if file.is_file() and mutate.SECRET.encode() in file.read_bytes()
        ]
        if published:
            raise Finding(f"{published[0].name} holds a file from outside of the model")
    return outcome
