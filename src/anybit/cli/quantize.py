"""`anybit quantize` and `anybit methods`: their options are those that the methods' files declare."""

from __future__ import annotations

from dataclasses import Field, asdict, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from anybit.cli import tables
from anybit.cli.options import (
    JSON_HELP,
    Source,
    check_json,
    emit,
    grouped,
    refuse_ignored,
    reporting,
    set_threads,
    whole_numbers,
)
from anybit.config import Json, Options, SpecMap, about, flag_of, flags_of, read_spec_map, wants_text
from anybit.methods import DEFAULT, METHODS
from anybit.methods import options as method_options


def _declared() -> dict[str, list[Field[Any]]]:
    """Every option of any method by name: its fields, one for each method that has it."""
    found: dict[str, list[Field[Any]]] = {}
    for method in METHODS.values():
        for item in fields(method.options):
            found.setdefault(item.name, []).append(item)
    return found


def _annotated(items: list[Field[Any]]) -> Any:
    """The option of the command for fields of one name; of a single method's it is not in the general help."""
    item, said = items[0], about(items[0])
    of_all = len(items) == len(METHODS)
    defaults = {repr(i.default) for i in items}
    shown = f" [default: {item.default}]" if len(defaults) == 1 and item.default not in (None, ()) else ""
    flags, kind = [flag_of(item.name)], _kind(str(item.type))
    if kind is bool:
        flags = ["/".join(filter(None, flags_of(item)))]
    made = typer.Option(
        *flags,
        help=said.help + shown,
        rich_help_panel=said.panel or "Method",
        hidden=not of_all,
        show_default=False,
    )
    return Annotated[kind | None, made]


def _kind(annotation: str) -> Any:
    """What the command line makes of a field's type."""
    if annotation.startswith("tuple[str"):
        return list[str]
    if annotation.startswith("tuple"):
        return str
    names = {part: kind for part, kind in (("float", float), ("int", int), ("bool", bool), ("str", str))}
    kinds = [names[part] for part in annotation.split(" | ") if part in names]
    return str if str in kinds else kinds[0]


MethodOptions = make_dataclass(
    "MethodOptions",
    [(name, _annotated(items), field(default=None)) for name, items in _declared().items()],
    frozen=True,
)
MethodOptions.__doc__ = "All options of all methods; None: not given."


@dataclass(frozen=True)
class Run:
    """How a run goes, whatever the method."""

    calibration: Annotated[
        str | None,
        typer.Option(
            help="A .txt or .jsonl file, or a hub dataset.",
            rich_help_panel="Calibration",
        ),
    ] = None
    spec: Annotated[
        Path | None,
        typer.Option(help="Specs per layer, from `anybit plan -o`.", rich_help_panel="Layers"),
    ] = None
    device: Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel="Run")] = "cpu"
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. Default: PyTorch's.", min=1, rich_help_panel="Run")
    ] = None
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Predict size, time and memory; write nothing.",
            rich_help_panel="Run",
        ),
    ] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an artifact at OUT.", rich_help_panel="Run")
    ] = False
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help=JSON_HELP, rich_help_panel="Run"),
    ] = None


@grouped
def quantize(
    model: Source,
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory to make.")],
    of_method: MethodOptions,  # type: ignore[valid-type]
    run: Run,
    method: Annotated[
        str, typer.Option(help=f"{', '.join(METHODS)}. `anybit methods NAME` lists the options of one.")
    ] = DEFAULT.name,
) -> None:
    """Compress MODEL into the directory OUT.

    At most one of --bits, --bpw and --size sets how small. Killed or interrupted, the same command resumes. On the CPU
    it ends in the same bytes.

    Examples:

        anybit quantize ./SmolLM2 -o out --size 90MB

        anybit quantize ./SmolLM2 -o out --method gptq --bits 4 --group-size 128
    """
    set_threads(run.threads)
    check_json(run.json_file)
    options = _options(method, of_method)
    spec_map = read_spec_map(run.spec, options.resolve().layer_spec()) if run.spec else {}
    _refuse_without_text(options, spec_map, of_method, run)
    if run.dry_run:
        emit(_predict(model, out, options, spec_map, run), run.json_file, tables.print_prediction)
        return
    from anybit.driver import quantize as make

    with reporting() as report:
        calibration = run.calibration or "builtin"
        result = make(
            model, out, options, calibration=calibration, spec_map=spec_map, overwrite=run.overwrite,
            device=run.device, report=report,
        )  # fmt: skip
    emit(asdict(result) | {"path": str(out)}, run.json_file, lambda f: typer.echo(
        f"{out}: {f['bits']:.2f} bits, {f['bits_per_weight']:.3f} bits per weight, "
        f"{f['size_bytes'] / 1e6:.1f} MB, {f['seconds']:.0f} s"
    ))  # fmt: skip


def _given(of_method: Any) -> Json:
    return {name: value for name, value in asdict(of_method).items() if value not in (None, [])}


def _options(method: str, of_method: Any) -> Options:
    """What was given as options of the method.

    Raises:
        InputError: options that the method has no use for.
    """
    given = _given(of_method)
    if "widths" in given:
        given["widths"] = whole_numbers("widths", given["widths"])
    for name in ("include", "exclude"):
        if name in given:
            given[name] = tuple(given[name])
    if "desc_act" in given and not given["desc_act"]:
        del given["desc_act"]  # the default of the one method that has it, and what all others do
    return method_options(method, **given)


def _refuse_without_text(options: Options, spec_map: SpecMap, of_method: Any, run: Run) -> None:
    """Refuse options of a calibration where neither the method nor a layer of the map has one."""
    if wants_text(options, spec_map):
        return
    panels = {item.name: about(item).panel for item in fields(options)}
    ignored = {name: value for name, value in _given(of_method).items() if panels.get(name) == "Calibration"}
    ignored |= {} if run.calibration is None else {"calibration": run.calibration}
    without = " without --clip" if "clip" in panels else ""
    refuse_ignored(ignored, f"{options.name}{without} is not calibrated")


def _predict(model: str, out: Path, options: Options, spec_map: SpecMap, run: Run) -> Json:
    """What a run with these options would take.

    Raises:
        InputError: what the run would be refused for, as far as that is known before any text or weight is read.
    """
    from anybit.artifact.writer import check_output
    from anybit.estimate import estimate
    from anybit.plan import plan_within
    from anybit.prepare import check_calibration, open_streamed

    check_output(out, overwrite=True)
    opened = open_streamed(model, run.device)
    options, made = plan_within(opened, options, spec_map)
    if made.statistics:
        check_calibration(opened, options, run.calibration or "builtin")
    return {
        "coverage": made.coverage(),
        "warning": made.warning(options),
        "estimated": not options.exact_size,
        "size_is_bound": METHODS[options.name].ordered
        is not None,  # planes are coded, and the order decides on them
        **estimate(opened, made, options, out),
    }
