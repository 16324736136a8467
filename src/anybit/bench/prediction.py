"""What computing, bytes and pages let a server do, without waiting, drawing, HTTP or Python. Nothing is fitted.

    k = min(most that may run, tokens that the KV-cache holds / (P + G))     texts together: pages
    V = max((W + k (P + G/2) K) / B, k c)                                    seconds of a step: bytes, computing
    X = (P + G) / (P c + G V / k)                                            tokens per second, prompts included

P and G are the mean tokens of a prompt and of an answer, W the bytes of weights that a step reads (without an embedding
beside a head of its own, of which few rows are looked up), K those of one token's keys and values, B the bytes per
second that the machine reads, c the seconds that one token of a prompt of P takes, both measured. A text is half done
on average, so its keys and values are of P + G/2 tokens. V takes the larger of reading and computing, as one hides
behind the other. It takes a token in a step of few texts to cost no more than one of a prompt, which is where a real
server loses most: c is of products with many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What is asked, and of whom."""

    prompt: float  # mean tokens
    answer: float
    running: int  # texts together, at most
    kv_tokens: int  # that the cache holds
    step_bytes: float  # of weights
    kv_token: float  # bytes of a token's keys and values
    read_rate: float  # bytes per second
    prompt_token: float  # seconds that a token of a prompt takes

    @property
    def together(self) -> float:
        """k, at least one text."""
        return max(1.0, min(self.running, self.kv_tokens / (self.prompt + self.answer)))

    @property
    def step(self) -> float:
        """V, in seconds."""
        kept = self.together * (self.prompt + self.answer / 2) * self.kv_token
        return max((self.step_bytes + kept) / self.read_rate, self.together * self.prompt_token)

    @property
    def tokens_per_second(self) -> float:
        """X."""
        seconds = self.prompt * self.prompt_token + self.answer * self.step / self.together
        return (self.prompt + self.answer) / seconds
