"""Tables of quality, from the cells that `anybit compare` wrote."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from figures import CLAIM, how, load, markdown, verdict

Cell = dict[str, Any]

NAMES = {
    "any-precision": "any-precision (one file)",
    "atom": "atom (inputs as wide)",
    "mixllm": "mixllm (8-bit inputs)",
    "smoothquant": "smoothquant (8-bit inputs)",
    "two-four-sixteen": "2/4/16, 0.2 % outliers",
}
BUDGETS = (2.5, 3, 3.5, 4, 5)  # bits per weight
WIKITEXT = ["smollm2-135m/results.json", "cmpq-fractional.json"]
C4 = ["c4.json"]
FIGURES = ("perplexity", "kld_mean")


def cells(path: str = "smollm2-135m/results.json") -> list[Cell]:
    """Quantized models, without the unquantized one."""
    return [cell for cell in load(path)["cells"] if cell["name"] != "unquantized"]


def perplexity(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.1f} million"
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def score(cell: Cell, task: str) -> str:
    return f"{100 * cell['tasks'][task]['acc_norm']:.0f}"


def machine(cell: Cell) -> str:
    return "A" if "AMD" in cell["machine"]["processor"] else "B"


def all_methods() -> str:
    """Every cell; wall seconds only of those that ran with nothing beside them."""
    quiet = {
        (name, bits) for name, widths in load("smollm2-135m/quiet.json")["cells"].items() for bits in widths
    }
    base = load("smollm2-135m/results.json")["cells"][0]
    rows = [["unquantized", "16", "16", perplexity(base["perplexity"]), "", "",
             score(base, "piqa"), score(base, "arc_easy"), "", "", "", ""]]  # fmt: skip
    for cell in cells():
        if cell["name"] == "anybit":
            continue
        row = [NAMES.get(cell["name"], cell["name"]), f"{cell['bits']:g}", *quality(cell)]
        row.append(f"{cell['seconds']:.0f}" if (cell["name"], cell["bits"]) in quiet else "")
        row.append(f"{cell['processor_seconds']:.0f}" if cell.get("processor_seconds") else "")
        rows.append([*row, f"{cell['peak_memory_bytes'] / 1e6:.0f}", machine(cell)])
    head = "method,bits,bpw,perplexity,KLD,top-1,PIQA,ARC-easy,seconds,processor s,peak MB,machine"
    return markdown(head.split(","), rows)


def pair(cell: Cell) -> str:
    """Perplexity and mean divergence."""
    return f"{perplexity(cell['perplexity'])}, {cell['kld_mean']:.4f}"


def quality(cell: Cell) -> list[str]:
    figures = [f"{cell['bits_per_weight']:.3f}", perplexity(cell["perplexity"]), f"{cell['kld_mean']:.4f}"]
    return [*figures, f"{100 * cell['top1_agreement']:.1f} %", score(cell, "piqa"), score(cell, "arc_easy")]


def methods() -> str:
    """The least perplexity of every method at no more than so many bits per weight; empty where that gains nothing."""
    limits = (2.5, 3, 3.5, 4, 4.5, 5.5, 6.5, 8.5)
    found: dict[str, list[Cell]] = {}
    for cell in (cell for path in WIKITEXT for cell in cells(path)):
        found.setdefault(cell["name"], []).append(cell)
    rows = []
    for name, same in sorted(found.items(), key=lambda item: (item[0] != "anybit", item[0].lower())):
        best = [min((c["perplexity"] for c in no_larger(same, b)), default=None) for b in limits]
        gains = [now if now != before else None for before, now in pairwise([None, *best])]
        rows.append([NAMES.get(name, name), *("" if value is None else perplexity(value) for value in gains)])
    return markdown(["bits per weight, at most", *(f"{limit:g}" for limit in limits)], rows)


def no_larger(others: Iterable[Cell], bpw: float) -> list[Cell]:
    return [cell for cell in others if cell["bits_per_weight"] <= bpw]


def sizes() -> str:
    """Every measured size of the one artifact, beside the best that other methods have at no more bits."""
    rows = []
    others = [cell for cell in cells() if cell["name"] != "anybit"]
    for cell in (cell for cell in cells() if cell["name"] == "anybit"):
        rivals = no_larger(others, cell["bits_per_weight"])
        first, second = (min(rivals, key=lambda c, k=key: c[k]) for key in ("perplexity", "kld_mean"))
        beside = f"{first['name']} {first['bits']:g}: {perplexity(first['perplexity'])}"
        beside += f" at {first['bits_per_weight']:.3f}"
        beside += f"; {second['name']} {second['bits']:g}: {second['kld_mean']:.4f}"
        rows.append([f"{cell['bits']:g}", *quality(cell), beside])
    head = ["average bits", "bpw", "perplexity", "KLD", "top-1", "PIQA", "ARC-easy"]
    return markdown([*head, "best others at no more bpw: perplexity; KLD"], rows)


def budgets(paths: Sequence[str]) -> list[tuple[Cell, Cell, Cell]]:
    """At each budget the largest size of the artifact that fits; the others' least perplexity and least divergence."""
    everything = [cell for path in paths for cell in cells(path)]
    ours = [cell for cell in everything if cell["name"] == "anybit"]
    others = [cell for cell in everything if cell["name"] != "anybit"]
    found = []
    for limit in BUDGETS:
        own = max(no_larger(ours, limit), key=lambda c: c["bits_per_weight"])
        first, second = (min(no_larger(others, limit), key=lambda c, k=key: c[k]) for key in FIGURES)
        found.append((own, first, second))
    return found


def beside_others(paths: Sequence[str]) -> str:
    rows = []
    for limit, (own, first, second) in zip(BUDGETS, budgets(paths)):
        met = own["perplexity"] < first["perplexity"] and own["kld_mean"] < second["kld_mean"]
        rows.append([f"{limit:g} bpw", named(own), named(first), named(second), verdict([("", met)])])
    head = [
        "at most",
        "`anybit`: perplexity, KLD (bpw)",
        "target: below this perplexity",
        "and below this KLD",
    ]
    return markdown([*head, ""], rows)


def named(cell: Cell) -> str:
    name = "" if cell["name"] == "anybit" else f"{cell['name']} {cell['bits']:g}: "
    return f"{name}{pair(cell)} ({cell['bits_per_weight']:.3f})"


def wikitext() -> str:
    return beside_others(WIKITEXT)


def c4() -> str:
    return beside_others(C4)


def c4_models() -> str:
    """Every model measured on the C4 sample."""
    rows = ([f"{c['name']} {c['bits']:g}", named(c).split(": ")[-1]] for c in cells("c4.json"))
    return markdown(["model", "perplexity, KLD (bpw)"], rows)


def file_sizes() -> str:
    """The default artifact in files of some sizes."""
    found = load("file-sizes.json")
    rows = [
        [
            cell["at_most"],
            f"{cell['size_bytes'] / 1e6:.1f} MB",
            f"{cell['bits']:.2f}",
            f"{cell['bits_per_weight']:.3f}",
            f"{cell['file_bits_per_weight']:.3f}",
            perplexity(cell["perplexity"]),
            f"{cell['kld_mean']:.4f}",
        ]
        for cell in found["cells"]
    ]
    layers = ["average bits of the layers", "bpw of the layers in memory", "in the files"]
    return how(found) + markdown(["at most", "files", *layers, "perplexity", "KLD"], rows)


def on_texts(path: str) -> str:
    """Artifacts made in different ways, at some widths over the same windows of several texts."""
    found = load(path)
    rows = [[text, *row] for text, of in found["texts"].items() for row in paired_rows(of)]
    return how(found) + markdown(["text", *paired_head(next(iter(found["texts"].values())))], rows)


def coded(path: str) -> str:
    """Linear layers alone: what they take in memory and, with planes entropy-coded, in the files."""
    found = load(path)
    rows = [
        [
            f"{cell['bits']:.2f}",
            f"{cell['bits_per_weight']:.3f}",
            f"{cell['file_bits_per_weight']:.3f}",
            pair(cell),
        ]
        for cell in found["cells"]
    ]
    return how(found) + markdown(
        ["average bits", "bpw in memory", "bpw in the files", "perplexity, KLD"], rows
    )


def llama_cpp(path: str) -> str:
    """llama.cpp's files, and one artifact of anybit at no more bytes."""
    found = load(path)
    rows = []
    for cell in found["cells"]:
        sizes = f"{cell['bytes'] / 1e6:.1f} MB, {cell['bpw']:.2f}", f"{cell['size_bytes'] / 1e6:.1f} MB"
        for text, theirs in cell["texts"].items():
            mean, low, high = (100 * math.expm1(value) for value in cell["kld_ratio"][text])
            figures = [pair(theirs), pair(cell["anybit"][text])]
            rows.append([cell["peer"], *sizes, text, *figures, f"{mean:+.0f} % ({low:+.0f} to {high:+.0f})"])
            cell["peer"], sizes = "", ("", "")
    head = ["llama.cpp", "MB, bits per weight", "anybit", "text", "llama.cpp", "anybit", "KLD (95 %)"]
    return how(found) + markdown(head, rows)


def layers_alone() -> str:
    """Layers of several artifacts in a base whose embedding and head are left as they are, on every text."""
    found = load("layers-qwen.json")
    texts = list(found["texts"].values())
    rows = [[name, *(figures_of(cells[name]) for cells in texts)] for name in texts[0]]
    return how(found) + markdown(["", *found["texts"]], rows)


def efforts() -> str:
    """Artifacts of each effort, against the first."""
    found = load("efforts.json")
    return how(found) + markdown(paired_head(found), paired_rows(found))


def attention() -> str:
    """Causal attention in bfloat16 beside PyTorch's."""
    found = load("attention.json")
    rows = []
    for row in found["attention"]:
        ours, peer = row["anybit_ms"], row["torch_ms"]
        heads = f"{row['heads']} for {row['key_heads']} of keys, of {row['head_size']} numbers"
        rows.append([heads, str(row["tokens"]), f"{ours:.1f}", f"{peer:.1f}", f"{ours / peer:.2f}"])
    return how(found) + markdown(["heads", "tokens", "anybit, ms", "PyTorch, ms", "share"], rows)


CONTENDERS = {  # of bench/peers/compare.py, in the order of the table
    "anybit-any-size": "the method anybit, one artifact of all sizes",
    "anybit": "GPTQ of this project",
    "gptqmodel": "GPTQModel {}",
    "autoround-light": "AutoRound {}, its light recipe",
}


def peers() -> str:
    """GPTQ and AutoRound of others beside this project's methods, at no more bytes: every text."""
    found = load("peers.json")
    measured = {row["method"]: row for row in found["rows"]}
    rows = [["unquantized", *(perplexity(own) for own in found["base_perplexity"].values())]]
    for name in filter(measured.__contains__, CONTENDERS):
        texts = measured[name]["texts"].values()
        version = " ".join(
            v for k, v in measured[name]["versions"].items() if k in ("gptqmodel", "auto-round")
        )
        cells = [f"{perplexity(text['perplexity'])}, {text['kld']:.4f}" for text in texts]
        rows.append([CONTENDERS[name].format(version), *cells])
    return how(found) + markdown(["", *found["base_perplexity"]], rows)


def figures_of(windows: Any) -> str:
    """Perplexity and divergence of some windows."""
    return f"{perplexity(math.exp(statistics.mean(windows['nll'])))}, {statistics.mean(windows['kld']):.4f}"


def paired_head(found: Any) -> list[str]:
    widths = next(iter(found["cells"].values()))
    return ["", *(f"{bits} bits" for bits in widths), "KLD, geometric mean over the widths (95 %)"]


def paired_rows(found: Any) -> list[list[str]]:
    """What `bench/paired.py` found: perplexity and divergence at every width, and the criterion against the first."""
    rows = []
    for name, widths in found["cells"].items():
        figures = [figures_of(of) for of in widths.values()]
        mean, low, high = (100 * math.expm1(value) for value in found["criteria"][name])
        rows.append([name, *figures, f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})" if mean else ""])
    return rows


def paired() -> str:
    """Artifacts made in different ways, at some widths over the same windows."""
    found = load("paired.json")
    return how(found) + markdown(paired_head(found), paired_rows(found))


def step(cell: Cell, after: Cell) -> tuple[float, float]:
    """By how much the loss changes to the next width, and two standard errors of it, in 1e-4 nats a token."""
    windows = len(cell["window_nll"])
    change = [(b - a) * windows / cell["tokens"] for a, b in zip(cell["window_nll"], after["window_nll"])]
    return 1e4 * statistics.mean(change), 2e4 * statistics.stdev(change) / math.sqrt(windows)


def curve() -> str:
    widths = load("curve.json")["cells"]
    steps = [f"{mean:+.1f} ± {error:.1f}" for mean, error in (step(a, b) for a, b in pairwise(widths))]
    rows = [
        [
            f"{c['bits']:g}",
            f"{c['bits_per_weight']:.3f}",
            f"{c['perplexity']:.2f}",
            f"{c['kld_mean']:.4f}",
            to_next,
        ]
        for c, to_next in zip(widths, [*steps, ""])
    ]
    return markdown(["bits", "bpw", "perplexity", "KLD", "to the next, 1e-4 nats, ± 2 standard errors"], rows)


def best_per_byte() -> str:
    """The artifact at BUDGETS beside all others that are no larger, on both texts; then its whole curve."""
    rows = []
    for text, paths in (("WikiText-2 test", WIKITEXT), ("the C4 sample", C4)):
        for key, name, form in zip(FIGURES, ("perplexity", "KLD"), (perplexity, "{:.4f}".format)):
            found = [(own[key], rivals[FIGURES.index(key)][key]) for own, *rivals in budgets(paths)]
            target, measured = (" / ".join(form(values[i]) for values in found) for i in (1, 0))
            met = [(f"{b:g}", ours < best) for b, (ours, best) in zip(BUDGETS, found)]
            rows.append([f"{name} on {text}", f"below {target}", measured, verdict(met)])
    return markdown(CLAIM, [*rows, monotone(), at_eight_bits()])


def monotone() -> list[str]:
    steps = [step(a, b) for a, b in pairwise(load("curve.json")["cells"])]
    rises = sum(mean > error for mean, error in steps)
    claim = f"of {len(steps)} steps from 2 to 8 bits, those that raise the loss"
    return [claim, "none up by over 2 standard errors", str(rises), verdict([("", rises == 0)])]


def at_eight_bits() -> list[str]:
    base = load("smollm2-135m/results.json")["cells"][0]["perplexity"]
    own = next(c["perplexity"] for c in cells() if (c["name"], c["bits"]) == ("anybit", 8))
    over = 100 * (own / base - 1)
    return [
        "8 bits, over the unquantized model",
        "at most 0.5 %",
        f"{over:.1f} %",
        verdict([("", over <= 0.5)]),
    ]
