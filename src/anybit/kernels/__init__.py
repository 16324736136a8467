"""Matrix kernels for the stored formats: fast ones where the machine has them, plain PyTorch everywhere."""

from anybit.kernels.dispatch import info

__all__ = ["info"]
