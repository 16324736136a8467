"""Does a change of the CPU's kernels leave every bit as it was? An old commit against this working tree.

    python bench/same_products.py [OLD_COMMIT] [--isas avx2,amx_bf16] [--formats W4,nested] [--old-build FOLDER]

Both trees run the same cases, each with its own sources and its own native extension, on every instruction set of this
machine: products of every stored format at every width, of float32 and bfloat16, of 1 to 530 tokens, at sizes that no
block, group or word divides, the dense matrices, the stored bytes that a layer gives back, and the kernels that
quantize. What is compared are digests of the bytes. A line says which cases differ; the last line is JSON.
Exit code: 0 all the same, 1 a difference or nothing compared, 2 wrong usage.

The old tree is a temporary worktree (default HEAD~1). Pip builds its extension, unless --old-build names a folder that
has it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from same_bytes import two_trees

SHAPES = (
    (70, 320),
    (261, 431),
    (300, 1216),
    (35, 5000),
)  # more than eight blocks of 16 rows; columns with and without rests, and those of several tiles
TOKENS = (1, 2, 3, 4, 5, 7, 9, 16, 17, 33, 70)
MANY = 530  # more than one batch; at the first shape
DTYPES = ("float32", "bfloat16")


def digest(*tensors: Any) -> str:
    import torch

    made = hashlib.sha256()
    for tensor in tensors:
        made.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        made.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]


def more_layouts(out: int, columns: int) -> dict[str, Any]:
    """What the benchmark leaves out: one bit, other groups, indices, columns of 16 bits beside codes, scaled inputs."""
    from anybit.formats import Float16Layout, GroupIntLayout
    from anybit.formats.layout import LayerLayout

    def group_int(bits: int, group_size: int, act_bits: int = 16, **place: Any) -> Any:
        return GroupIntLayout(bits=bits, group_size=group_size, symmetric=False, act_bits=act_bits, **place)

    few = columns // 8
    tiles = {f"W{bits} g{size}": [group_int(bits, size)] for bits in range(1, 9) for size in (32, 100)}
    tiles |= {
        f"W{bits}A8 g{size}": [group_int(bits, size, 8)]
        for bits in range(1, 9)
        for size in (32, 100, columns)
    }
    tiles |= {"float16": [Float16Layout()]}
    tiles["float16 columns"] = [group_int(3, 32, cols=columns - few), Float16Layout(cols=few)]
    tiles["float16 rows"] = [group_int(3, 32, rows=out - 7), Float16Layout(rows=7)]
    made = {name: LayerLayout((out, columns), tuple(entry)) for name, entry in tiles.items()}
    return made | {"W4 scaled": LayerLayout((out, columns), (group_int(4, 32),), input_scale=True)}


def weight(layout: Any, seed: int) -> Any:
    """Random bytes of a layout: the benchmark's, with scales and tables that differ from one another."""
    import torch

    from anybit.bench.kernels import random_weight
    from anybit.formats.weight import PackedWeight

    torch.manual_seed(seed)
    made = random_weight(layout)
    tensors = dict(made.tensors)
    for field, tensor in tensors.items():
        if field.endswith("act_clip"):
            tensors[field] = torch.full_like(tensor, 0.9)
        elif tensor.is_floating_point():
            tensors[field] = torch.randn(tensor.shape).clamp(-2, 2).to(tensor.dtype)
    return PackedWeight(made.layout, tensors)


def bind(stored: Any, int8: bool, isa: str | None) -> Any:
    """A weight bound to its kernels, as either tree calls it."""
    from anybit.kernels import dispatch

    if hasattr(dispatch, "BoundWeight"):
        return dispatch.BoundWeight(stored, "int8" if int8 else "fp16", isa)
    return dispatch.Prepared(stored, not int8, isa)


def products(isas: list[str], formats: list[str]) -> Iterator[tuple[str, str]]:
    """`(case, digest)` of every format's products."""
    import torch

    from anybit.bench.kernels import layouts

    for at, (out, columns) in enumerate(SHAPES):
        for name, layout in (layouts(out, columns) | more_layouts(out, columns)).items():
            if formats and not any(name.startswith(one) for one in formats):
                continue
            stored = weight(layout, at)
            case = f"{name} {out}x{columns}"
            yield f"{case} stored", digest(*stored.tensors.values())
            inputs = torch.randn(MANY, columns, generator=torch.Generator().manual_seed(at))
            for isa in isas:
                bound = bind(stored, name.endswith(" A8"), isa)
                yield f"{case} @{isa} dense", digest(bound.dequantize(), bound.dequantize(torch.bfloat16))
                restored = bound.unpack() if hasattr(bound, "unpack") else bound.restore()
                yield f"{case} @{isa} restored", digest(*restored.values())
                for dtype in DTYPES:
                    for m in (*TOKENS, MANY) if at == 0 else TOKENS:
                        x = inputs[:m].to(getattr(torch, dtype))
                        yield f"{case} @{isa} {dtype} {m} tokens", digest(bound.matmul(x))


def quantizing() -> Iterator[tuple[str, str]]:
    """`(case, digest)` of the kernels that quantize."""
    import torch

    from anybit.kernels import cpu

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    rows, n = 37, 101
    matrix, importance = normal(rows, n), normal(n).square()
    inverse = torch.linalg.cholesky(torch.eye(n) + 0.1 * torch.cov(normal(n, 3 * n))).T.contiguous()
    scale, zero, top = normal(rows, n).abs() / 4, torch.full((rows, n), 7.0), torch.full((rows,), 15.0)
    tables = torch.cat([normal(5, 2**b).sort(1).values for b in range(1, 5)], 1)
    kinds, sizes = torch.arange(rows).remainder(5).byte(), normal(rows).abs()
    for isa in ("portable", "avx2", "avx512"):
        if isa not in cpu.matmul_isas():
            continue
        yield f"gptq @{isa}", digest(*cpu.gptq_block(matrix.clone(), inverse, scale, zero, top, isa=isa))
        yield f"kmeans @{isa}", digest(*cpu.kmeans(matrix, importance, 3, 6, isa=isa))
        targets = matrix.expand(4, rows, n).contiguous()
        yield f"nested codes @{isa}", digest(*nested_codes(targets, inverse, tables, kinds, sizes, isa))
        yield (
            f"nested fit @{isa}",
            digest(*cpu.nested_fit(matrix, importance, tables[:, 2:6].contiguous(), isa=isa)),
        )
    has_dot = getattr(cpu, "has_bfloat16_dot", None) or cpu.has_moments  # of commits before
    if has_dot():
        hessian = torch.zeros(n, n)
        cpu.moments(matrix.bfloat16(), hessian)
        yield "moments", digest(hessian)
    if has_dot() and hasattr(cpu, "causal_attention"):
        heads = normal(1, 4, 70, 64).bfloat16()
        yield "attention", digest(*(x.float() for x in cpu.causal_attention(heads, heads, heads, 0.1)))


def nested_codes(*operands: Any) -> Any:
    """All widths count alike; commits before rows had weights of their own take those of all rows."""
    import torch

    from anybit.kernels import cpu

    *given, isa = operands
    try:
        return cpu.nested_codes(*given, torch.ones(given[0].shape[1], 4), isa=isa)
    except ValueError:
        return cpu.nested_codes(*given, torch.ones(4), isa=isa)


def run_side(tree: Path, isas: list[str], formats: list[str]) -> dict[str, str]:
    """In a process of its own: every case's digest, with the sources of `tree`."""
    # An editable install would import its own sources, whatever PYTHONPATH says.
    sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
    import torch

    import anybit
    from anybit.kernels import cpu

    if not Path(anybit.__file__).is_relative_to(tree):
        raise SystemExit(f"{anybit.__file__} was imported, not the sources in {tree}: uninstall that anybit")
    if not cpu.available():
        raise SystemExit(f"{tree.name}: {cpu.why_not()}")
    torch.set_num_threads(2)
    here = list(cpu.matmul_isas())
    if unknown := set(isas) - set(here):
        raise SystemExit(f"instruction set {sorted(unknown)[0]!r}: this machine has {', '.join(here)}")
    found = dict(products(isas or here, formats))
    return found if formats else found | dict(quantizing())


def run_both(trees: list[Path], isas: list[str], formats: list[str]) -> list[dict[str, str]]:
    running = []
    try:
        for tree in trees:
            argv = [sys.executable, __file__, "--run-side", str(tree), json.dumps(isas), json.dumps(formats)]
            env = os.environ | {"PYTHONPATH": str(tree / "src")}
            running.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True))
        said = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise SystemExit("a tree's process ended early: its reason stands above")
    return [json.loads(text) for text in said]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", default="HEAD~1", metavar="OLD_COMMIT")
    parser.add_argument("--isas", default="", help="comma-separated; default: all of this machine")
    parser.add_argument("--formats", default="", help="comma-separated beginnings of names; default: all")
    parser.add_argument("--old-build", type=Path, metavar="FOLDER", help="where the old extension is")
    args = parser.parse_args()
    isas, formats = ([one for one in text.split(",") if one] for text in (args.isas, args.formats))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with two_trees(args.commit, False, args.old_build) as trees:
        old, new = run_both(trees, isas, formats)
    cases = sorted(old.keys() | new.keys())
    different = [case for case in cases if old.get(case) != new.get(case)]
    for case in different:
        print(
            f"{case}: DIFFERS"
            if case in old and case in new
            else f"{case}: only {'old' if case in old else 'new'}"
        )
    print(
        json.dumps({"same": bool(cases) and not different, "cases": len(cases), "different": len(different)})
    )
    return int(not cases or bool(different))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run-side"]:
        print(json.dumps(run_side(Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]))))
    else:
        sys.exit(main())
