"""The model card that goes into every artifact."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from anybit.artifact.config_json import own_windows_note
from anybit.checkpoint.architectures import is_encoder
from anybit.config import Json, Options, flag_of, flags_of
from anybit.methods import changed

if TYPE_CHECKING:
    from anybit.artifact.contents import Plan
    from anybit.artifact.levels import Size
    from anybit.checkpoint.directory import Checkpoint


SEVERAL = """
That loads all levels that are there. A model can be loaded at one of them, and change later:

```python
model = anybit.load("PATH", bits={bits})  # or most bits per weight (bpw=), or bytes (size="...MB")
model.set_bits({fewer})  # from now on
```
"""


def model_card(
    checkpoint: Checkpoint,
    plan: Plan,
    options: Options,
    provenance: Json,
    sizes: Sequence[Size],
) -> str:
    """Markdown: what this is, how it was made, its figures, how to use it.

    Args:
        checkpoint: of the base model.
        plan: what is stored; where there are enhancement layers, the base layer.
        options: that made it, none of them open.
        provenance: see `config_json.provenance`.
        sizes: the levels of the artifact.
    """
    base, calibration = provenance["base"], provenance["calibration"]
    auto = "AutoModel" if is_encoder(checkpoint.config) else "AutoModelForCausalLM"
    name = base["name"]
    text = "none (the method looks at weights alone)"
    if calibration:
        text = (
            f"{calibration['samples']} x {calibration['seq_len']} tokens of `{calibration['source']}` "
            f"(SHA-256 `{calibration['sha256'][:16]}`){own_windows_note(calibration)}"
        )
    usual = options.layer_spec()
    mixed = any(spec != usual for spec in plan.specs.values())
    first, last = sizes[0], sizes[-1]
    bits = f"{plan.code_bits:.2f}" if len(sizes) == 1 else f"{first.bits:.2f} to {last.bits:.2f}"
    step = (last.bits - first.bits) / 4
    more = SEVERAL.format(bits=f"{first.bits + 2 * step:.1f}", fewer=f"{first.bits + step:.1f}")
    notice = ""
    if base["quantized_before"]:
        notice = f"\n> **Notice.** {quantized_notice(base['quantized_before'])}\n"
    return f"""---
library_name: transformers
tags: [anybit, quantized]
---
# {name}, {bits} bits ({provenance["method"]})

Made with anybit {provenance["anybit_version"]}:

```
{_command(name, options, calibration)}{" --spec MAP.json" if mixed else ""}
```
{notice}
| | |
|---|---|
| embedding and head | {_embedding(options)} |
| calibration | {text} |
| base | `{name}`, SHA-256 `{base["sha256"][:16]}` |

{_table(sizes, plan.linear_weights)}

## Use

```python
import anybit  # teaches Transformers the format; without it the weights would be ignored
from transformers import {auto}

model = {auto}.from_pretrained("PATH")
```
{more if len(sizes) > 1 else ""}
The licence of the base model applies.
"""


def _embedding(options: Options) -> str:
    """What `embed_bits` leads to, in words."""
    if options.embed_bits is None:
        return "nested, their planes in one order with those of the layers"
    return f"{options.embed_bits} bits"


def _table(sizes: Sequence[Size], weights: int) -> str:
    """The levels as `anybit plan` lists them: average width, bits per weight, files but the tokenizer, loss."""
    rows = [
        "| bits | bits per weight in memory | size of the files | expected increase of the loss, nats per token |",
        "|---|---|---|---|",
    ]
    for size in sizes:
        loss = "not known" if size.loss is None else f"{size.loss:.4f}"
        stored = 8 * size.layer_bytes / weights
        rows.append(f"| {size.bits:.2f} | {stored:.3f} | {size.size_bytes / 1e6:.1f} MB | {loss} |")
    return "\n".join(rows)


def with_sizes(card: str, sizes: Sequence[Size], weights: int) -> str:
    """A card with the table of other sizes in place of its own; one that has no such table stays as it is."""
    lines, table = card.splitlines(), _table(sizes, weights).splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("| bits | bits per weight")), None)
    if first is None:
        return card
    last = next((i for i in range(first, len(lines)) if not lines[i].startswith("|")), len(lines))
    return "\n".join([*lines[:first], *table, *lines[last:]]) + "\n"


def quantized_notice(before: str) -> str:
    """What to know of figures whose base was quantized `before`, such as "Q4_1"."""
    return (
        f"The base weights had been quantized before ({before}). At 4 bits and above, errors measured against this "
        "base are smaller than against the original model."
    )


def _command(name: str, options: Options, calibration: Json | None) -> str:
    """The command line that makes these options from the defaults."""
    words = ["anybit", "quantize", name, "-o", "OUT", "--method", options.name]
    sized = any(getattr(options, size) is not None for size in options.sized_by)
    given = changed(options) if sized else {"bits": options.bits, **changed(options)}
    items = {item.name: item for item in fields(options)}
    for key, value in given.items():
        if sized and key == "bits":
            continue  # it follows
        if isinstance(value, bool):
            words.append(flags_of(items[key])[not value])
        elif key in ("include", "exclude"):
            words += [word for pattern in value for word in (flag_of(key), pattern)]
        elif isinstance(value, tuple):
            words += [flag_of(key), ",".join(map(str, value))]
        else:
            words += [flag_of(key), str(value)]
    if calibration and calibration["source"] != "builtin":
        words += ["--calibration", calibration["source"]]
    return shlex.join(words)
