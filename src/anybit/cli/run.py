"""`anybit generate` and `anybit chat`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from anybit.cli.options import Level, Model, Running, check_seed, grouped, reporting


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn. Above temperature 0, what is left out is as generation_config.json says."""

    temperature: Annotated[
        float, typer.Option(help="0: always the likeliest token.", rich_help_panel="Drawing")
    ] = 0.0
    top_k: Annotated[
        int | None, typer.Option(help="So many of the likeliest; 0: all.", rich_help_panel="Drawing")
    ] = None
    top_p: Annotated[
        float | None, typer.Option(help="The likeliest of so much probability.", rich_help_panel="Drawing")
    ] = None
    min_p: Annotated[
        float | None, typer.Option(help="From this share of the likeliest's on.", rich_help_panel="Drawing")
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: less of what was there.", rich_help_panel="Drawing")
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="Ends the text; repeatable.", rich_help_panel="Drawing")
    ] = None
    seed: Annotated[
        int, typer.Option(help="Draws again alike.", callback=check_seed, rich_help_panel="Drawing")
    ] = 0

    def asked(self) -> Any:
        """As `anybit.generate.Generator` takes it."""
        return {name: value for name, value in vars(self).items() if value is not None and value != []}


@grouped
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="Text to continue.")],
    level: Level,
    running: Running,
    drawing: Drawing,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to add.", min=1)] = 128,
) -> None:
    """Continue a text.

    Example: `anybit generate out -p "The capital of France is" --max-new-tokens 20`
    """
    asked = level.asked() | running.asked()
    from anybit.generate import Generator

    with reporting() as report:
        generator = Generator(model, report=report, **asked)
    ids = generator.encode(prompt)
    generator.check(drawing.asked())
    typer.echo(prompt, nl=False)
    generator.stream(ids, max_new_tokens, **drawing.asked())


@grouped
def chat(
    model: Model,
    level: Level,
    running: Running,
    drawing: Drawing,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens per answer.", min=1)] = 512,
) -> None:
    """Talk with MODEL, which must have a chat template.

    An empty line, Ctrl-D or /exit ends it; /new starts over; Ctrl-C stops an answer, or ends the chat between two.
    """
    asked = level.asked() | running.asked()
    from anybit.generate import Generator, converse

    with reporting() as report:
        generator = Generator(model, report=report, **asked)
    converse(generator, max_new_tokens, **drawing.asked())
