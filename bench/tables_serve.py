"""The table of the server's speed, from what `python bench/serve_latency.py --json bench/results/serve.json` wrote."""

from __future__ import annotations

from figures import load, markdown


def latency() -> str:
    head = ["model", "bits", "in process, tokens/s", "over HTTP", "slower by", "4 streams over one", "8"]
    head += ["first turn, s", "second turn"]
    rows = [
        [
            found["model"],
            f"{found['bits']:.2f}",
            f"{found['in_process']:.0f}",
            f"{found['one_stream']:.0f}",
            f"{100 * found['slower_than_in_process']:.1f} %",
            f"{found['four_over_one']:.2f}",
            f"{found['eight_over_one']:.2f}",
            f"{found['first_turn_seconds']:.1f}",
            f"{100 * found['second_over_first_turn']:.1f} %",
        ]
        for found in load("serve.json")
    ]
    return markdown(head, rows)
