"""`anybit generate` and `anybit chat`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from anybit.cli.options import Level, Model, Running, check_seed, given, grouped, refuse_ignored, reporting


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
        float | None,
        typer.Option(
            help="Drop tokens below this share of the likeliest token's probability.",
            rich_help_panel="Drawing",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: less of what was there.", rich_help_panel="Drawing")
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="Ends the text; repeatable.", rich_help_panel="Drawing")
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(help="Draws again alike. [default: 0]", callback=check_seed, rich_help_panel="Drawing"),
    ] = None

    def asked(self) -> Any:
        """As `anybit.generate.Generator` takes it.

        Raises:
            InputError: options of drawing, and none is wanted.
        """
        if self.temperature == 0:
            drawing = given(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed)
            refuse_ignored(drawing, "without --temperature above 0 the likeliest token is always taken")
        asked = {name: value for name, value in vars(self).items() if value is not None and value != []}
        return {"seed": 0} | asked


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
    asked, drawn = level.asked() | running.asked(), drawing.asked()
    from anybit.generate import Generator

    with reporting() as report:
        generator = Generator(model, report=report, **asked)
    ids = generator.encode(prompt)
    generator.check(drawn)
    typer.echo(prompt, nl=False)
    generator.stream(ids, max_new_tokens, **drawn)


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
    asked, drawn = level.asked() | running.asked(), drawing.asked()
    from anybit.generate import Generator, converse

    with reporting() as report:
        generator = Generator(model, report=report, **asked)
    converse(generator, max_new_tokens, **drawn)
