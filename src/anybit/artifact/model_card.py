"""The model card that goes into every artifact."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from anybit.checkpoint.architectures import is_encoder
from anybit.config import Options, flag_of, flags_of
from anybit.methods import changed

if TYPE_CHECKING:
    from anybit.artifact.contents import Plan
    from anybit.checkpoint.directory import Checkpoint


@dataclass(frozen=True)
class Enhancements:
    """The enhancement layers beside a base layer."""

    bits: float  # average width with all of them
    bytes: int  # of their files


REFINED = """
That reads all enhancement layers that are there. The base layer and any first ones of them are a model:

```python
model = anybit.load("PATH", bits={bits})  # or most bits per weight (bpw=), or bytes (size="...MB")
model.set_bits({fewer})  # from now on
```
"""


def model_card(
    checkpoint: Checkpoint,
    plan: Plan,
    options: Options,
    provenance: Mapping[str, Any],
    beside: Enhancements | None = None,
) -> str:
    """Markdown: what this is, how it was made, its figures, how to use it.

    Args:
        checkpoint: of the base model.
        plan: what is stored; of an artifact of enhancement layers the base layer.
        options: that made it, none of them open.
        provenance: see `config_json.provenance`.
        beside: the enhancement layers.
    """
    base, calibration = provenance["base"], provenance["calibration"]
    auto = "AutoModel" if is_encoder(checkpoint.config) else "AutoModelForCausalLM"
    name = base["name"]
    text = "none (the method looks at weights alone)"
    if calibration:
        text = (
            f"{calibration['samples']} x {calibration['seq_len']} tokens of `{calibration['source']}` "
            f"(SHA-256 `{calibration['sha256'][:16]}`)"
        )
    usual = options.layer_spec()
    mixed = any(spec != usual for spec in plan.specs.values())
    bits, width, stored, tensors = _figures(plan, beside)
    more = ""
    if beside is not None:
        step = (beside.bits - plan.code_bits) / 4
        more = REFINED.format(bits=f"{plan.code_bits + 2 * step:.1f}", fewer=f"{plan.code_bits + step:.1f}")
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
| average code width | {width} |
| stored bits per weight (linear layers) | {stored} |
| tensors | {tensors} |
| embedding and head | {provenance["options"]["embed_bits"]} bits |
| calibration | {text} |
| base | `{name}`, SHA-256 `{base["sha256"][:16]}` |

## Use

```python
import anybit  # teaches Transformers the format; without it the weights would be ignored
from transformers import {auto}

model = {auto}.from_pretrained("PATH")
```
{more}
The licence of the base model applies.
"""


def _figures(plan: Plan, beside: Enhancements | None) -> tuple[str, str, str, str]:
    """Bits in short, the average width, stored bits per weight, bytes: also those of what lies beside a base layer."""
    bits, width = f"{plan.code_bits:.2f}", f"{plan.code_bits:.3f} bits"
    stored, tensors = f"{plan.bits_per_weight:.3f}", f"{plan.tensor_bytes / 1e6:.1f} MB"
    if plan.file_bits_per_weight != plan.bits_per_weight:
        stored = f"{plan.file_bits_per_weight:.3f}, of which a run at the widest reads {stored}"
    if beside is None:
        return bits, width, stored, tensors
    whole = plan.bits_per_weight + 8 * beside.bytes / plan.linear_weights
    return (
        f"{bits} to {beside.bits:.2f}",
        f"{plan.code_bits:.3f} (base layer) to {beside.bits:.3f} bits (with all enhancement layers), chosen at load or "
        "later",
        f"{stored} (base layer) to {whole:.3f}",
        f"{tensors} (base layer) and {beside.bytes / 1e6:.1f} MB (enhancement layers)",
    )


def quantized_notice(before: str) -> str:
    """What to know of figures whose base was quantized `before`, such as "Q4_1"."""
    return (
        f"The base weights had been quantized before ({before}). At 4 bits and above, errors measured against this "
        "base are smaller than against the original model."
    )


def _command(name: str, options: Options, calibration: Mapping[str, Any] | None) -> str:
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
