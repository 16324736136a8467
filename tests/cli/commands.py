"""Commands in this process, as the installed script calls them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file


@dataclass
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def refused(ran: Ran, *words: str) -> None:
    """Exit code 2 and one line on standard error that says `words`."""
    assert ran.code == 2, ran
    assert "Traceback" not in ran.err
    last = ran.err.strip().splitlines()[-1]
    assert last.startswith("anybit: "), ran.err
    for word in words:
        assert word in last, last


def recomputed_bits_per_weight(out: Path) -> float:
    """8 x bytes of the linear layers' tensors in the files / their weights."""
    tensors = {name: t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}
    layers = json.loads((out / "config.json").read_text())["quantization_config"]["layers"]
    size, weights = 0, 0
    for name, layout in layers.items():
        weights += layout["shape"][0] * layout["shape"][1]
        size += sum(t.nbytes for key, t in tensors.items() if key.startswith(f"{name}."))
    return 8 * size / weights
