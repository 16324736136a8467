"""Kernels of nested codes index tables with what they have checked: whoever changes it meanwhile changes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anybit.kernels import cpu

if not cpu.available():
    pytest.skip(str(cpu.why_not()), allow_module_level=True)

pytestmark = pytest.mark.native

ROWS, COLUMNS, WIDTHS, KINDS = 60_000, 64, 2, 3


def arrays() -> dict[str, Tensor]:
    """What both kernels read, of codes of up to two bits."""
    generator = torch.Generator().manual_seed(0)
    one, two = torch.rand(KINDS, 2, generator=generator), torch.rand(KINDS, 4, generator=generator)
    return {
        "targets": torch.randn(WIDTHS, ROWS, COLUMNS, generator=generator),
        "tables": torch.cat([one.sort(1).values, two.sort(1).values], 1),
        "kinds": torch.randint(0, KINDS, (ROWS,), generator=generator, dtype=torch.uint8),
        "codes": torch.randint(0, 4, (ROWS, COLUMNS), generator=generator, dtype=torch.uint8),
    }


def while_changed(changed: Tensor, run: Callable[[], None]) -> None:
    """Fill `changed` with indices of nothing a while after `run` began, unless that is over by then."""
    began, over = threading.Event(), threading.Event()

    def fill() -> None:
        began.wait()
        time.sleep(0.02)  # copied and checked by then, and far from done
        if not over.is_set():
            changed.fill_(255)

    worker = threading.Thread(target=fill)
    worker.start()
    began.set()
    run()
    over.set()
    worker.join()


def chosen(given: dict[str, Tensor], kinds: Tensor, changing: bool) -> list[Tensor]:
    codes, errors = torch.empty(ROWS, COLUMNS, dtype=torch.uint8), torch.empty(WIDTHS, ROWS, COLUMNS)
    inverse, scales, weights = torch.eye(COLUMNS), torch.ones(ROWS), torch.ones(ROWS, WIDTHS)

    def run() -> None:
        cpu._native.nested_codes(
            given["targets"], inverse, given["tables"], kinds, scales, weights, codes, errors, 1
        )

    while_changed(kinds, run) if changing else run()
    return [codes, errors]


def chosen_anew(
    given: dict[str, Tensor], kinds: Tensor, codes: Tensor, changed: Tensor | None
) -> list[Tensor]:
    slopes, weight, made = given["targets"], given["targets"][0].clone(), []
    hessian, scales, weights = torch.eye(COLUMNS), torch.ones(ROWS), torch.ones(ROWS, WIDTHS)
    errors, losses = torch.zeros(WIDTHS, ROWS, COLUMNS), torch.zeros(ROWS, WIDTHS)

    def run() -> None:
        cpu._native.nested_descent(
            slopes, hessian, weight, given["tables"], kinds, scales, weights, codes, errors, losses, 1
        )
        made.append(codes.clone())

    while_changed(changed, run) if changed is not None else run()
    return [*made, errors, losses]


def test_shapes_that_change_while_codes_are_chosen() -> None:
    given = arrays()
    expected = chosen(given, given["kinds"], changing=False)
    assert all(torch.equal(*pair) for pair in zip(chosen(given, given["kinds"], changing=True), expected))


@pytest.mark.parametrize("field", ["kinds", "codes"])
def test_indices_that_change_while_codes_are_chosen_anew(field: str) -> None:
    given = arrays()
    kinds, codes = given["kinds"].clone(), given["codes"].clone()
    expected = chosen_anew(given, given["kinds"], given["codes"], None)
    made = chosen_anew(given, kinds, codes, kinds if field == "kinds" else codes)
    assert all(torch.equal(*pair) for pair in zip(made, expected))
