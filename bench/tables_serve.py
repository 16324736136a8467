"""Tables of the server's speed, from what bench/serve_latency.py and bench/serve_drafts.py wrote."""

from __future__ import annotations

from figures import load, markdown


def latency() -> str:
    head = ["model", "bits", "in process, tokens/s", "over HTTP", "slower by", "4 streams over one", "8"]
    head += ["8 in process, tokens/s", "8 over HTTP", "slower by", "first turn, s", "second turn"]
    rows = [
        [
            found["model"],
            f"{found['bits']:.2f}",
            f"{found['in_process']:.0f}",
            f"{found['one_stream']:.0f}",
            f"{100 * found['slower_than_in_process']:.1f} %",
            f"{found['four_over_one']:.2f}",
            f"{found['eight_over_one']:.2f}",
            f"{found['eight_in_process']:.0f}",
            f"{found['eight_streams']:.0f}",
            f"{100 * found['eight_slower_than_in_process']:.1f} %",
            f"{found['first_turn_seconds']:.1f}",
            f"{100 * found['second_over_first_turn']:.1f} %",
        ]
        for found in load("serve.json")
    ]
    return markdown(head, rows)


def drafts() -> str:
    head = [
        "what",
        "drawn",
        "prompts",
        "without drafts, tokens/s",
        "with",
        "ratio",
        "a tenth has less than",
        "least",
    ]
    head += ["draft tokens", "of these drawn"]
    rows = [
        [
            found["kind"],
            "greedily" if run["temperature"] == 0 else f"at temperature {run['temperature']:g}",
            str(found["prompts"]),
            f"{found['without_drafts']:.0f}",
            f"{found['tokens_per_second']:.0f}",
            f"{found['ratio']:.2f}",
            f"{found['tenth_ratio']:.2f}",
            f"{found['least_ratio']:.2f}",
            f"{found['draft_tokens']}",
            f"{100 * found['accepted_tokens'] / found['draft_tokens']:.0f} %",
        ]
        for run in load("serve-drafts.json")
        for found in run["kinds"]
    ]
    return markdown(head, rows)
