"""Tokens per second of mistral.rs, of decoding behind some tokens or of a prompt: what `contenders.MistralRs` starts.

python mistralrs_rate.py FILE BEFORE TOKENS WARM_UP

It runs in an interpreter that has the package `mistralrs`, and needs nothing else of it. 0 tokens: the rate of what is
before them. The last line of what it prints has the rate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PIECES = (" a", "b")  # texts that are a token each time: one of them in any vocabulary of bytes and words


def main() -> None:
    path, before, tokens, warm_up = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    runner = opened(path)
    ask(runner, warm_up, warm_up)
    usage = ask(runner, before, tokens + 1)  # the first token is the prompt's
    rate = tokens / usage.total_completion_time_sec if tokens else before / usage.total_prompt_time_sec
    print(json.dumps({"tokens_per_second": rate}))


def opened(path: Path) -> Any:
    """A file's model, one text at a time; nothing of a text is kept for the next."""
    from mistralrs import Runner, Which

    which = Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
    return Runner(which=which, max_seqs=1, prefix_cache_n=0, token_source="none")


def ask(runner: Any, before: int, tokens: int) -> Any:
    """What so many tokens behind so many others took, the likeliest each time."""
    from mistralrs import CompletionRequest

    request = CompletionRequest(
        prompt=text(runner, before), model="", max_tokens=tokens, temperature=0.0, ignore_eos=True
    )
    usage = runner.send_completion_request(request).usage
    if (usage.prompt_tokens, usage.completion_tokens) != (before, tokens):
        sys.exit(
            f"{usage.completion_tokens} tokens came behind {usage.prompt_tokens}; "
            f"{tokens} behind {before} were asked for"
        )
    return usage


def text(runner: Any, tokens: int) -> str:
    """A text of so many tokens, those that begin every text included."""
    for piece in PIECES:
        more = counted(runner, piece * tokens) - tokens
        made = piece * (tokens - more)
        if counted(runner, made) == tokens:
            return made
    sys.exit(f"no text of {tokens} tokens was found: neither {' nor '.join(map(repr, PIECES))} is one token")


def counted(runner: Any, made: str) -> int:
    return len(runner.tokenize_text(made, True, None))


if __name__ == "__main__":
    main()
