"""Tables of the server's speed, from what `anybit bench serve` and bench/serve_*.py wrote."""

from __future__ import annotations

from typing import Any

from figures import load, markdown


def latency() -> str:
    head = ["model", "bits", "in process, tokens/s", "over HTTP", "slower by"]
    head += ["4 streams over one, in process", "8", "4 over HTTP", "8"]
    head += ["8 in process, tokens/s", "8 over HTTP", "slower by", "first turn, s", "second turn"]
    head += ["beside a prompt of 4096, p99, ms"]
    rows = [
        [
            found["model"],
            f"{found['bits']:.2f}",
            f"{found['in_process']:.0f}",
            f"{found['one_stream']:.0f}",
            f"{100 * found['slower_than_in_process']:.1f} %",
            scaled(found.get("four_over_one_in_process"), 1, 2),
            scaled(found.get("eight_over_one_in_process"), 1, 2),
            f"{found['four_over_one']:.2f}",
            f"{found['eight_over_one']:.2f}",
            f"{found['eight_in_process']:.0f}",
            f"{found['eight_streams']:.0f}",
            f"{100 * found['eight_slower_than_in_process']:.1f} %",
            f"{found['first_turn_seconds']:.1f}",
            f"{100 * found['second_over_first_turn']:.1f} %",
            scaled(found.get("gap_beside_a_prompt_p99"), 1000, 0),
        ]
        for found in load("serve.json")
    ]
    return markdown(head, rows)


def cells_of(name: str) -> tuple[list[Any], Any]:
    """What `anybit bench serve` measured of one trace, and of it the reference."""
    cells = load(f"{name}.json")["cells"]
    first, *more = [cell for cell in cells if cell["reference"]]
    if more:
        raise ValueError(f"{name}.json has cells of several plans: keep those of one")
    return cells, first


def saturated(name: str) -> str:
    """Servers with as many requests of a trace together as may run, beside what was predicted."""
    cells, first = cells_of(name)
    head = [
        "system",
        "weights, MB",
        "KV, MB",
        "tokens that fit",
        "texts at once",
        "tokens/s",
        "drawn, tokens/s",
    ]
    head += ["over bf16", "predicted", "token to token, ms", "p99"]
    rows = []
    for cell in cells:
        ran, (measured, predicted) = (
            cell["saturation"],
            [
                cell[part]["tokens_per_second"] / first[part]["tokens_per_second"]
                for part in ("saturation", "predicted")
            ],
        )
        rows.append(
            [
                cell["system"],
                f"{cell['weight_bytes'] / 1e6:.0f}",
                f"{cell['kv_bytes'] / 1e6:.0f}",
                str(cell["kv_tokens"]),
                str(ran["most_at_once"]),
                f"{ran['tokens_per_second']:.0f}",
                f"{ran['output_tokens_per_second']:.0f}",
                f"{measured:.2f}",
                f"{predicted:.2f}",
                *(scaled(ran[gap], 1000, 0) for gap in ("gap_p50", "gap_p99")),
            ]
        )
    return markdown(head, rows)


def timed(name: str) -> str:
    """The same servers with requests at the trace's own times, stretched to a share of the reference's rate."""
    head = [
        "system",
        "requests",
        "ended",
        "good",
        "good/s",
        "first token, s",
        "p99",
        "token to token, ms",
        "p99",
    ]
    rows = []
    for cell in cells_of(name)[0]:
        ran = cell["load"]
        rows.append(
            [
                cell["system"],
                *(str(ran[field]) for field in ("offered", "completed", "good")),
                f"{ran['goodput']:.2f}",
                *(scaled(ran[time], 1, 1) for time in ("first_token_p50", "first_token_p99")),
                *(scaled(ran[gap], 1000, 0) for gap in ("gap_p50", "gap_p99")),
            ]
        )
    return markdown(head, rows)


def scaled(value: float | None, by: float, digits: int) -> str:
    return "" if value is None else f"{by * value:.{digits}f}"


def drafts() -> str:
    head = [
        "model",
        "what",
        "drawn",
        "prompts",
        "without drafts, tokens/s",
        "with",
        "ratio",
        "a tenth has less than",
        "least",
    ]
    head += ["twice without: a tenth", "least", "draft tokens", "of these right", "drafted at 3 bits"]
    rows = [
        [
            f"{run['model']}, {run['bits']:.2f} bits",
            found["kind"],
            "greedily" if run["temperature"] == 0 else f"at temperature {run['temperature']:g}",
            str(found["prompts"]),
            f"{found['without_drafts']:.0f}",
            f"{found['tokens_per_second']:.0f}",
            f"{found['ratio']:.2f}",
            f"{found['tenth_ratio']:.2f}",
            f"{found['least_ratio']:.2f}",
            scaled(found.get("tenth_ratio_of_none"), 1, 2),
            scaled(found.get("least_ratio_of_none"), 1, 2),
            f"{found['draft_tokens']}",
            f"{100 * found['accepted_tokens'] / found['draft_tokens']:.0f} %",
            f"{found['narrow_tokens']}" if "narrow_tokens" in found else "",
        ]
        for run in load("serve-drafts.json")
        for found in run["kinds"]
    ]
    return markdown(head, rows)
