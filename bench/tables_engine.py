"""Tables of whole models' speed, from what `anybit bench decode -o bench/results/engine/decode.json` wrote."""

from __future__ import annotations

import re
from typing import Any

from figures import how, load, markdown

DEPTH = 128  # tokens before the one that is decoded, where nothing else is said


def cells(test: str, file: str = "decode") -> list[dict[str, Any]]:
    return [cell for cell in load(f"engine/{file}.json")["cells"] if cell["test"] == test]


def named(name: str) -> str:
    """A contender as a reader knows it: no precision in this project's words, no file's name."""
    name = re.sub(r"^anybit ([\d.]+) int8\b", r"anybit, \1 bits, inputs of 8 bits", name)
    name = re.sub(r"^anybit ([\d.]+) fp16\b", r"anybit, \1 bits, exact inputs", name)
    name = re.sub(r"^(llama\.cpp|mistral\.rs) (?:.*-)?(Q\w+)\.gguf", r"\1 \2", name)
    name = re.sub(r" kv(\d+)$", r", KV of \1 bits", name)
    return re.sub(r"^Transformers ([\d.]+) (\w+)$", r"Transformers, \1 bits, \2", name)


def decode() -> str:
    """One token behind 128 others, keys and values of 16 bits."""
    head = ["model", "who", "MB a token", "tokens/s", "range", "of the read rate"]
    rows = []
    for cell in cells("decode"):
        for name, found in cell["contenders"].items():
            if cell["tokens"] == DEPTH and " kv" not in name:
                rows.append([cell["shape"], named(name), *speed(name, found)])
    return markdown(head, rows)


def targets() -> str:
    """What was to be reached with AVX-512, of the cells of that machine."""
    words = {True: "met", False: "**missed**", None: "see below"}
    rows = []
    for one in load("engine/decode.json")["targets"]:
        must, measured = (f"{one[key]:.3g}" if one[key] is not None else "" for key in ("must", "measured"))
        rows.append([f"{one['row']}", one["target"], must, measured, words[one["met"]]])
    return markdown(["row", "what", "target", "measured", ""], rows)


def depths() -> str:
    """The same behind more, inputs of 8 bits."""
    head = ["model", "behind", "who", "MB a token", "tokens/s", "range", "of the read rate"]
    rows = []
    for cell in cells("decode"):
        for name, found in cell["contenders"].items():
            if cell["tokens"] != DEPTH and re.match(r"anybit [\d.]+ int8|llama|mistral", name):
                rows.append([cell["shape"], f"{cell['tokens']}", named(name), *speed(name, found)])
    return markdown(head, rows)


def quality() -> str:
    """What rounded inputs, keys and values make of a text."""
    rows = [
        [named(name), f"{found['perplexity']:.3f}", f"{found['kld']:.4f}"]
        for cell in cells("quality", "quality")
        for name, found in cell["contenders"].items()
        if found["engine"] == "anybit"
    ]
    return markdown(["who", "perplexity", "KLD"], rows)


def steps() -> str:
    """One token of each of several texts."""
    found = load("engine/steps.json")
    many = [n for n in found[0]["over_one"] if n != "1"]
    rows = [
        [
            f"{one['model']}, {one['bits']:.2f} bits",
            f"{one['milliseconds']['1']:.1f}",
            *(f"{one['over_one'][n]:.2f}" for n in many),
        ]
        for one in found
    ]
    return markdown(["model", "one, ms", *many], rows)


def formats() -> str:
    """Two artifacts at equal bytes."""
    found = load("engine/formats.json")
    rows = [
        [
            f"{row['megabytes']:g} MB",
            str(row["texts"]),
            " and ".join(f"{bits:.2f}" for bits in row["bits"]),
            " and ".join(f"{ms:.1f}" for ms in row["milliseconds"]),
            f"{row['ratio']:.2f}",
            f"{row['least']:.2f} to {row['most']:.2f}",
        ]
        for row in found["rows"]
    ]
    head = ["in memory, at most", "texts", "average bits of the layers", "ms", "ratio", "range"]
    return how(found) + markdown(head, rows)


def rate(found: dict[str, Any]) -> list[str]:
    """Tokens per second and their range."""
    low, high = found["range"]
    return [f"{found['tokens_per_second']:.0f}", f"{low:.0f} to {high:.0f}"]


def speed(name: str, found: dict[str, Any]) -> list[str]:
    """Bytes, tokens per second, their range and the share of the memory's rate."""
    limit = f"{100 * found['of_limit']:.0f} %" if name.startswith("anybit") else ""
    return [f"{found['bytes_per_token'] / 1e6:.0f}", *rate(found), limit]


def prefill() -> str:
    """A prompt, from nothing."""
    rows = []
    for cell in cells("prefill"):
        for name, found in cell["contenders"].items():
            rows.append([cell["shape"], named(name), f"{cell['tokens']}", *rate(found)])
    return markdown(["model", "who", "tokens", "tokens/s", "range"], rows)


def without_amx() -> str:
    """On a machine with AVX-512 and without AMX."""
    return tokens_and_prompts("decode-vnni")


def zen3() -> str:
    """On a machine with AVX2 alone, an older one."""
    return tokens_and_prompts("decode-zen3")


def tokens_and_prompts(file: str) -> str:
    """One token and prompts, of one machine."""
    prompts = {(cell["model"], cell["tokens"]): cell["contenders"] for cell in cells("prefill", file)}
    sizes = sorted({tokens for _, tokens in prompts})
    rows = [
        [
            *(cell["shape"], named(name), *speed(name, found)),
            *(one for n in sizes for one in rate(prompts[cell["model"], n][name])),
        ]
        for cell in cells("decode", file)
        for name, found in cell["contenders"].items()
    ]
    titles = [one for n in sizes for one in (f"prompt of {n}, tokens/s", "range")]
    head = ["model", "who", "MB a token", "tokens/s", "range", "of the read rate", *titles]
    return markdown(head, rows)


def avx2() -> str:
    """One token and a prompt, on a machine without AVX-512."""
    rows, prompts = [], set()
    for file in ("decode-avx2", "decode-avx2-qwen3", "decode-avx2-kv8"):
        many = cells("prefill", file)
        prompts.update(cell["tokens"] for cell in many)
        for cell in cells("decode", file):
            for name, found in cell["contenders"].items():
                prompt = ["", ""]
                if cell["tokens"] == DEPTH:
                    prompt = rate(many[0]["contenders"][name])
                row = [cell["shape"], f"{cell['tokens']}", named(name), *speed(name, found)[:3], *prompt]
                rows.append(row)
    (prompt_tokens,) = prompts
    title = f"prompt of {prompt_tokens}, tokens/s"
    return markdown(["model", "behind", "who", "MB a token", "tokens/s", "range", title, "range"], rows)


def avx2_deep() -> str:
    """The same behind more tokens: cells that take long, of one round each."""
    rows = []
    for file in (
        "decode-avx2-deep-2048",
        "decode-avx2-deep-2048-kv8",
        "decode-avx2-deep-8192",
        "decode-avx2-deep-8192-kv8",
    ):
        for cell in cells("decode", file):
            for name, found in cell["contenders"].items():
                mb, tokens = f"{found['bytes_per_token'] / 1e6:.0f}", f"{found['tokens_per_second']:.1f}"
                rows.append([cell["shape"], f"behind {cell['tokens']}", named(name), mb, tokens])
        for cell in cells("prefill", file):
            for name, found in cell["contenders"].items():
                tokens = f"{found['tokens_per_second']:.1f}"
                rows.append([cell["shape"], f"prompt of {cell['tokens']}", named(name), "", tokens])
    return markdown(["model", "test", "who", "MB a token", "tokens/s"], rows)


def disturbed() -> str:
    """How much of two processors others took, at most, in each cell."""
    rows = [
        [
            cell["shape"],
            f"{cell['test']}, {cell['tokens']}",
            f"{max(found['others'] for found in cell['contenders'].values()):.2f}",
        ]
        for cell in [*cells("decode"), *cells("prefill")]
    ]
    return markdown(["model", "test", "processors that others took, at most"], rows)
