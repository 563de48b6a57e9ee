"""Which tensors of a DCP folder are the model's, and their plain names.

A state dict is often saved inside others ({"model": ..., "optim": ...}, {"app": {"model": ...}}), and modules
wrapped for training put their own marks into names. An export carries neither.
"""

from dcp_convert.metadata import DcpIndex, TensorEntry
from flywheel_shared.errors import UserError

# Marks of wrappers inside a name: torch.compile, FSDP1, activation checkpointing.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def model_tensors(index: DcpIndex) -> tuple[dict[str, TensorEntry], list[str]]:
    """Return (plain name -> tensor, names left out), the first in the order of their names.

    Where the saved state dict nests one called "model", the model is what lies in it and the rest (optimizer,
    counters) is left out; else every tensor belongs to the model. What is no tensor is left out always.
    Raises UserError when nothing is found, two models are, or two tensors get one name.
    """
    prefixes = sorted({prefix for path in index.paths.values() if (prefix := _model_prefix(path))}, key=len)
    if len(prefixes) > 1:
        found = ", ".join(".".join(prefix) for prefix in prefixes)
        raise UserError(f"{index.folder}: holds more than one model ({found})")
    prefix = prefixes[0] if prefixes else ()
    plain: dict[str, TensorEntry] = {}
    left_out = []
    for name, path in index.paths.items():
        if name not in index.tensors or path[: len(prefix)] != prefix:
            left_out.append(name)
            continue
        new = plain_name(".".join(path[len(prefix) :]))
        if new in plain:
            raise UserError(
                f"{index.folder}: {name} and {plain[new].name} are both called {new} in an export"
            )
        plain[new] = index.tensors[name]
    if not plain:
        raise UserError(f"{index.folder}: holds no tensor of a model")
    return {name: plain[name] for name in sorted(plain, key=natural)}, sorted(left_out, key=natural)


def plain_name(name: str) -> str:
    """`name` without the marks of wrappers, `module.` of DistributedDataParallel at its start included."""
    for mark in _WRAPPERS:
        name = name.replace(mark, "")
    return name.removeprefix("module.")


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts blocks.2 before blocks.10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def _model_prefix(path: tuple[str, ...]) -> tuple[str, ...] | None:
    return path[: path.index("model") + 1] if "model" in path[:-1] else None
