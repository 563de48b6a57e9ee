"""Element types: PyTorch's names, their sizes, and what safetensors calls them.

Checkpoints are read without importing torch (seconds and half a gigabyte that an inspection or a conversion
need not spend), so types go by name here and torch is imported only by a cast.
"""

from dataclasses import dataclass

import numpy as np

from flywheel_shared.errors import UserError


@dataclass(frozen=True)
class ElementType:
    """One element type: `name` as in `torch.<name>`, `size` in bytes, the safetensors name or None."""

    name: str
    size: int
    safetensors: str | None


# In the order of the safetensors library, which lays the types of a file out from the last to the first:
# sizes never grow within a file, so that every tensor starts at a multiple of its element size.
_TYPES = (
    ElementType("bool", 1, "BOOL"),
    ElementType("uint8", 1, "U8"),
    ElementType("int8", 1, "I8"),
    ElementType("float8_e5m2", 1, "F8_E5M2"),
    ElementType("float8_e4m3fn", 1, "F8_E4M3"),
    ElementType("float8_e8m0fnu", 1, "F8_E8M0"),
    ElementType("int16", 2, "I16"),
    ElementType("uint16", 2, "U16"),
    ElementType("float16", 2, "F16"),
    ElementType("bfloat16", 2, "BF16"),
    ElementType("int32", 4, "I32"),
    ElementType("uint32", 4, "U32"),
    ElementType("float32", 4, "F32"),
    ElementType("complex64", 8, "C64"),
    ElementType("float64", 8, "F64"),
    ElementType("int64", 8, "I64"),
    ElementType("uint64", 8, "U64"),
    ElementType("complex128", 16, None),
)
BY_NAME = {kind.name: kind for kind in _TYPES}
BY_SAFETENSORS = {kind.safetensors: kind for kind in _TYPES if kind.safetensors}
FILE_ORDER = {kind.name: place for place, kind in enumerate(reversed(_TYPES))}

# Only these are cast: a float8 tensor means nothing without its scale, integers are indices and masks.
CASTABLE = ("float64", "float32", "bfloat16", "float16")
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def raw(kind: ElementType) -> np.dtype:
    """The numpy type that carries elements of `kind` bit by bit (numpy has no bfloat16)."""
    return np.dtype(_RAW[kind.size])


def target_of(kind: ElementType, dtype: str) -> ElementType:
    """The type a tensor of `kind` gets in the output; `dtype` is "keep" or one of CASTABLE."""
    return kind if dtype == "keep" or kind.name not in CASTABLE else BY_NAME[dtype]


def cast(values: np.ndarray, source: ElementType, target: ElementType, name: str) -> np.ndarray:
    """Convert `values`, any shape, from the raw carrier of `source` to that of `target`, as `Tensor.to` does.

    Rounds to nearest even. Raises UserError when a finite value of tensor `name` becomes infinite.
    """
    if source == target:
        return values
    import torch

    before = torch.from_numpy(values.reshape(-1).view(np.uint8)).view(getattr(torch, source.name))
    after = before.to(getattr(torch, target.name))
    if not torch.isfinite(after).all():  # rare, so the closer look costs nothing
        overflowed = torch.isinf(after) & torch.isfinite(before)
        if overflowed.any():
            worst = before[overflowed].abs().max().item()
            raise UserError(
                f"tensor {name}: {worst:g} does not fit {target.name} (largest: "
                f"{torch.finfo(after.dtype).max:g}); choose --dtype keep, float32 or bfloat16"
            )
    return after.view(torch.uint8).numpy().view(raw(target)).reshape(values.shape)
