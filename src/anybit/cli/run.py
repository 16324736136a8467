"""`anybit generate` and `anybit chat`."""

from __future__ import annotations

from typing import Annotated

import typer

from anybit.cli.options import Level, Model, Running, Seed, grouped, reporting


@grouped
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="Text to continue.")],
    level: Level,
    running: Running,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to add.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.0,
    seed: Seed = 0,
) -> None:
    """Continue a text.

    Example: `anybit generate out -p "The capital of France is" --max-new-tokens 20`
    """
    asked = level.asked() | running.asked()
    from anybit.generate import Generator

    with reporting() as report:
        generator = Generator(model, report=report, **asked)
    ids = generator.encode(prompt)
    typer.echo(prompt, nl=False)
    generator.stream(ids, max_new_tokens, temperature, seed)


@grouped
def chat(
    model: Model,
    level: Level,
    running: Running,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens per answer.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.0,
    seed: Seed = 0,
) -> None:
    """Talk with MODEL, which must have a chat template.

    An empty line, Ctrl-D or /exit ends it; /new starts over; Ctrl-C stops an answer, or ends the chat between two.
    """
    asked = level.asked() | running.asked()
    from anybit.generate import Generator, converse

    with reporting() as report:
        generator = Generator(model, report=report, **asked)
    converse(generator, max_new_tokens, temperature, seed)
