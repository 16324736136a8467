"""A Transformers causal LM or encoder of which only one block is in memory at a time.

The model is built on the meta device; the parts outside the blocks are materialised for the one pass that
turns tokens into the first block's input, and each block for as long as it is worked on.
"""

from __future__ import annotations

import ctypes
import fnmatch
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from anybit.calibration.meta_model import (
    checkpoint_names,
    find_blocks,
    meta_model,
    nearest_model,
    refuse_fused_experts,
)
from anybit.checkpoint.architectures import is_encoder, refuse_unused
from anybit.checkpoint.directory import Checkpoint
from anybit.errors import InputError
from anybit.formats.bits import FP16_MAX
from anybit.progress import Advance

M_MMAP_THRESHOLD = -3  # glibc's name of the option, in malloc.h
UNFILLED = 0xFF  # in every byte of a buffer that is to be computed: no number that one would hold


@dataclass(frozen=True)
class BlockCall:
    """How the model calls its blocks: everything but the hidden states, which the block takes first."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StreamedModel:
    """Blocks, linears and tensors of a checkpoint, loaded on demand.

    Args:
        checkpoint: what to load from.
        dtype: what the model computes in.
        device: where its parts are loaded to, and run.

    Raises:
        InputError: an architecture whose blocks or linear layers cannot be found, or with experts fused
            into one parameter.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: str = "cpu") -> None:
        self.checkpoint = checkpoint
        self.dtype, self.device = dtype, torch.device(device)
        self.model = meta_model(checkpoint, dtype)
        self.encoder = is_encoder(checkpoint.config)
        self.block_prefix, self.blocks = find_blocks(self.model)
        refuse_fused_experts(self.model, self.blocks)
        self.names = checkpoint_names(self.model, checkpoint)
        refuse_unused(checkpoint.source, self.model, self.left_out())

    def block_name(self, i: int) -> str:
        return f"{self.block_prefix}.{i}"

    def linears(self, i: int) -> dict[str, nn.Module]:
        """Full name -> `nn.Linear` or `Conv1D` of block i, in the model's order."""
        prefix = self.block_name(i)
        return {f"{prefix}.{name}": m for name, m in self.blocks[i].named_modules() if is_linear(m)}

    def all_linears(self) -> dict[str, tuple[int, int]]:
        """Full name -> (out, in) of every linear layer inside the blocks."""
        return {n: linear_shape(m) for i in range(len(self.blocks)) for n, m in self.linears(i).items()}

    def weight(self, name: str) -> Tensor:
        """The weight of a linear layer, float32 [out, in] in fresh memory on the device, whichever way it is stored."""
        stored = self.read(f"{name}.weight").to(self.device).float()
        if isinstance(self.model.get_submodule(name), Conv1D):
            stored = stored.T.contiguous()
        return stored

    def read(self, name: str) -> Tensor:
        """A checkpoint tensor by its name in the model, on the CPU, checked for NaN and Inf.

        Raises:
            InputError: the tensor holds NaN or Inf.
        """
        tensor = self.checkpoint.read(self.names[name])
        # A finite sum proves that all values are finite, at a fraction of the exact test's cost.
        if (
            tensor.is_floating_point()
            and not tensor.sum().isfinite()
            and not (finite := tensor.isfinite()).all()
        ):
            raise InputError(
                f"{self.names[name]} holds {int((~finite).sum())} NaN or Inf values: the checkpoint is damaged; "
                "download it again"
            )
        return tensor

    def check_weights(self, advance: Advance) -> None:
        """Read every tensor once, so that what cannot be quantized is refused before hours of work.

        Args:
            advance: told of each tensor.

        Raises:
            InputError: NaN, Inf, a linear weight beyond what a float16 scale can hold, or a tied head of its own.
        """
        self._check_tied()
        matrices = {f"{name}.weight" for name in self.all_linears()}
        for name in self.names:
            tensor = self.read(name)
            if name in matrices and tensor.abs().max() > FP16_MAX:
                raise InputError(
                    f"{self.names[name]} holds weights up to {float(tensor.abs().max()):.3g}, beyond the {FP16_MAX:g} "
                    "that float16 scales can hold: is the checkpoint intact?"
                )
            advance(1)

    def _check_tied(self) -> None:
        """Where the checkpoint holds a tied tensor, it must be the one that it is tied to: only that one is used."""
        tied = self.model.all_tied_weights_keys
        for name in self.left_out():
            if (source := self.names.get(tied.get(name, ""))) is None:
                continue
            own, used = self.checkpoint.read(name), self.checkpoint.read(source)
            if own.dtype != used.dtype or not torch.equal(own, used):
                raise InputError(
                    f"{name} differs from {source}, to which config.json ties it: set tie_word_embeddings to false, or "
                    "use the config.json that belongs to the weights"
                )

    def tensor_names(self, i: int | None) -> list[str]:
        """Names of the parameters and persistent buffers of block i, or of everything outside the blocks."""
        prefix = self.block_prefix + "." if i is None else self.block_name(i) + "."
        return [n for n in self.names if n.startswith(prefix) == (i is not None)]

    @contextmanager
    def block(self, i: int) -> Iterator[nn.Module]:
        """Block i with its weights, for the length of a `with`."""
        self.materialise_block(i)
        try:
            yield self.blocks[i]
        finally:
            self.blocks[i].to("meta")
            _return_memory()

    def outside_modules(self) -> dict[str, nn.Module]:
        """Modules outside the blocks that hold tensors: embeddings, final norm, rotary tables, pooler, head."""
        inside = set(self.blocks.modules())
        return {n: m for n, m in self.model.named_modules() if m not in inside and _own_tensors(m)}

    def check_structure(self) -> None:
        """Refuse, before any long work, a model whose blocks cannot be calibrated one by one.

        Raises:
            InputError: see `first_inputs`.
        """
        different = torch.tensor([[0, 0], [1, 1]])  # so that what depends on tokens shows
        self.first_inputs(different, lambda i, hidden: None)

    @cached_property
    def uncalled(self) -> list[str]:
        """Linear layers of the blocks that the model does not call: it multiplies with their weights by itself.

        Found without weights or memory; where a model does not run so, none is found.
        """
        called: set[nn.Module] = set()
        layers = {name: module for i in range(len(self.blocks)) for name, module in self.linears(i).items()}
        hooks = [module.register_forward_pre_hook(lambda m, _: called.add(m)) for module in layers.values()]
        try:
            with torch.no_grad():
                tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
                # With a cache no mask is looked at, which has no numbers either.
                self.model.base_model(input_ids=tokens, use_cache=not self.encoder)
        except Exception:  # whatever a model's code does where there are no numbers
            return []
        finally:
            for hook in hooks:
                hook.remove()
        return [name for name, module in layers.items() if module not in called]

    def left_out(self) -> list[str]:
        """Tensors of the checkpoint that this model has no place for: known exceptions, see `refuse_unused`."""
        used = set(self.names.values())
        return [name for name in self.checkpoint.names() if name not in used]

    def note_of_left_out(self) -> str | None:
        """A sentence where `left_out` names any."""
        if not (names := self.left_out()):
            return None
        count = f"{len(names)} tensors of the checkpoint"
        return f"{count} have no place in this model and are left out, such as {names[0]}"

    def materialise(self, module: nn.Module, prefix: str) -> None:
        """Allocate the tensors of a module, not those of modules in it, and fill them from the checkpoint.

        Raises:
            InputError: a buffer that no checkpoint stores and Transformers does not compute.
        """
        module.to_empty(device=self.device, recurse=False)
        _compute_buffers(self.model, module, prefix)
        with torch.no_grad():
            for name, target in _own_tensors(module).items():
                full = f"{prefix}.{name}".removeprefix(".")
                if full in self.names:
                    target.copy_(self.read(full))

    def materialise_block(self, i: int) -> None:
        """Allocate block i and fill it."""
        for name, module in self.blocks[i].named_modules(prefix=self.block_name(i)):
            self.materialise(module, name)

    def first_inputs(self, tokens: Tensor, keep: Callable[[int, Tensor], None]) -> list[BlockCall]:
        """Hand the hidden states that enter block 0 to `keep`, row by row of tokens [n, seq_len].

        Returns:
            How each block is called.

        Raises:
            InputError: a model whose blocks do not follow one another directly, or get other inputs that depend on
                the tokens; see also `materialise`.
        """
        outside = {
            n: m for n, m in self.outside_modules().items() if m is not self.model.get_output_embeddings()
        }
        for name, module in outside.items():
            self.materialise(module, name)
        calls: list[BlockCall] = []
        tuples = self._takes_tuples(tokens[0].to(self.device))
        with _recorded(self.blocks, tuples) as records, torch.no_grad():
            for i, row in enumerate(tokens.to(self.device)):
                records.clear()
                self._run_stubs(row)
                self._check_records(records, calls, len(row))
                keep(i, records[0][0].to(self.dtype))
                calls = calls or [call for _, call in records]
        for module in outside.values():
            module.to("meta")
        return calls

    def _run_stubs(self, row: Tensor) -> None:
        """One forward of the model around its replaced blocks."""
        try:
            self.model.base_model(input_ids=row[None], use_cache=False)
        except (ValueError, IndexError, TypeError, AttributeError) as error:  # at what a stub returned
            raise InputError(
                f"{self.model.config.model_type} models take more from their blocks than hidden states ({error}): this "
                "architecture cannot be calibrated yet; choose --method rtn"
            ) from error

    def _takes_tuples(self, row: Tensor) -> bool:
        """Whether the model takes the first of a block's outputs: of a tensor in their place, that has no batch."""
        # What fails here fails again when it matters.
        with _recorded(self.blocks, tuples=False) as records, torch.no_grad(), suppress(Exception):
            self.model.base_model(input_ids=row[None], use_cache=False)
        return len(records) > 1 and records[1][0].shape == records[0][0].shape[1:]

    def _check_records(
        self, records: list[tuple[Tensor, BlockCall]], calls: list[BlockCall], length: int
    ) -> None:
        """The blocks ran one after another on `length` hidden states, called as for the rows of tokens before."""
        kind = self.model.config.model_type
        if len(records) != len(self.blocks) or any(not _equal(h, records[0][0]) for h, _ in records):
            raise InputError(
                f"{kind} models do not run their {len(self.blocks)} blocks one after another on the hidden states, "
                "which anybit needs: this architecture is not supported yet"
            )
        if records[0][0].shape[1] != length:
            raise InputError(
                f"the blocks of {kind} get {records[0][0].shape[1]} states for {length} tokens: padded windows cannot "
                "be calibrated yet; choose --method rtn"
            )
        compared: set[tuple[int, int]] = set()  # blocks mostly get the very same tensors
        if any(not _same(call, known, compared) for (_, call), known in zip(records, calls)):
            raise InputError(
                f"the blocks of {kind} get inputs besides the hidden states that depend on the tokens: this "
                "architecture is not supported yet"
            )


def map_large_arrays() -> None:
    """Have the system's allocator map arrays of 8 MB or more one by one from now on, each given back once it is freed.

    By itself glibc soon takes such arrays from its heap, whose holes double the memory of a backward pass.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, 8 << 20)


@contextmanager
def earlier_objects_frozen() -> Iterator[None]:
    """Keep garbage collection from going over what exists already: the objects of libraries, 0.2 s for every block.

    A process that has objects frozen keeps them, and nothing is done here.
    """
    gc.collect()
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _return_memory() -> None:
    """Give freed memory back to the system: glibc keeps the holes that blocks of many sizes leave, and they add up."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def run_block(block: nn.Module, hidden: Tensor, call: BlockCall) -> Tensor:
    """One block's output hidden states [1, seq_len, hidden]."""
    output = block(hidden, *call.args, **call.kwargs)
    return output[0] if isinstance(output, tuple) else output


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or isinstance(module, Conv1D)


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """(out, in) of a linear layer, also of GPT-2's transposed Conv1D."""
    a, b = module.weight.shape  # type: ignore[misc]
    return (int(b), int(a)) if isinstance(module, Conv1D) else (int(a), int(b))


def selected(name: str, include: tuple[str, ...], exclude: tuple[str, ...]) -> bool:
    """Whether a layer is to be quantized under `--include` and `--exclude` glob patterns."""
    wanted = not include or any(fnmatch.fnmatchcase(name, p) for p in include)
    return wanted and not any(fnmatch.fnmatchcase(name, p) for p in exclude)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module itself, by name."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _compute_buffers(model: Any, module: nn.Module, name: str) -> None:
    """Fill a module's buffers that no checkpoint stores (rotary tables, position ids) the way Transformers does."""
    computed = {
        n: b for n, b in module.named_buffers(recurse=False) if n in module._non_persistent_buffers_set
    }
    if not computed:
        return
    for parameter in module.parameters():  # the checkpoint fills them: no random numbers are to be drawn
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for buffer in computed.values():
        _bytes(buffer).fill_(UNFILLED)
    nearest_model(model, name)._init_weights(module)
    for own, buffer in computed.items():
        if buffer.numel() and (_bytes(buffer) == UNFILLED).all():
            raise InputError(
                f"{model.config.model_type} models keep {name}.{own} outside the checkpoint, and anybit does not know "
                "how to fill it: this architecture cannot be calibrated yet; choose --method rtn"
            )


def _bytes(buffer: Tensor) -> Tensor:
    return buffer.reshape(-1).view(torch.uint8)


@contextmanager
def _recorded(blocks: nn.ModuleList, tuples: bool) -> Iterator[list[tuple[Tensor, BlockCall]]]:
    """Replace every block's forward by one that notes its call and hands its input on, alone or in a tuple."""
    records: list[tuple[Tensor, BlockCall]] = []

    def stub(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        records.append((hidden_states, BlockCall(args, kwargs)))
        return (hidden_states,) if tuples else hidden_states

    for block in blocks:
        block.forward = stub
    try:
        yield records
    finally:
        for block in blocks:
            del block.forward


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a, b)


def _same(a: Any, b: Any, compared: set[tuple[int, int]]) -> bool:
    """Whether two recorded calls pass equal arguments; pairs of tensors found equal are not compared again."""
    if isinstance(a, BlockCall):
        return _same(a.args, b.args, compared) and _same(a.kwargs, b.kwargs, compared)
    if isinstance(a, Tensor):
        if (id(a), id(b)) in compared:
            return True
        compared.add((id(a), id(b)))
        return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(_same(x, y, compared) for x, y in zip(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k], compared) for k in a)
    return type(a) is type(b) and (a == b or not isinstance(a, str | int | float))
