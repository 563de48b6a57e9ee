"""FSDP2 over a mesh: sharding, mixed precision, activation checkpointing, compilation, clipping."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flywheel_shared.mesh import Mesh

Precision = Literal["bf16", "fp32"]
ActivationCheckpointing = Literal["none", "full", "selective"]

# What is dear to compute again: matrix products and attention. The rest (norms, activations, rotations) is
# bound by memory and comes back cheaply.
_KEPT_OPS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def shard_model(
    model: nn.Module,
    mesh: Mesh,
    blocks: Sequence[nn.Module],
    *,
    precision: Precision = "bf16",
    activation_checkpointing: ActivationCheckpointing = "none",
    compile: bool = False,
    reshard_after_forward: bool = True,
    cast_inputs: bool = True,
) -> FSDPModule:
    """Shard `model` in place: each of `blocks` by itself, then what is left at the root.

    Parameters must be float32 and, unless on the meta device, equal on all ranks. They stay float32 shards
    (DTensors) under their own names; with bf16, blocks compute in bfloat16 and gradients are summed in
    float32. `activation_checkpointing` recomputes blocks in the backward pass: full keeps their inputs only,
    selective also the outputs of matrix products and attention. `compile` compiles each block by itself, so
    that all blocks of a kind share one compilation. Call the model, not a method of it: FSDP works in hooks.
    Without `cast_inputs` inputs arrive as they are, for models whose times must stay float32.
    """
    policy = MixedPrecisionPolicy()
    placement = functools.partial(_placement, ranks=mesh.fsdp.size(-1))
    if precision == "bf16":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=cast_inputs
        )
    for block in blocks:
        if activation_checkpointing != "none":
            _checkpoint_activations(block, activation_checkpointing)
        if compile:
            block.compile()
        fully_shard(
            block,
            mesh=mesh.fsdp,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=placement,
        )
    model.register_forward_hook(_own_memory)  # before FSDP's own hook
    # The root's parameters are needed again at once, by the backward pass of its last layers.
    return fully_shard(
        model, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False, shard_placement_fn=placement
    )


@torch.no_grad()
def fill_shards(
    model: nn.Module,
    device: torch.device,
    seed: int,
    value: Callable[[str, torch.Size, torch.Generator], Tensor],
) -> None:
    """Give a model that was sharded on the meta device its memory, and its parameters their first values.

    `value` makes one whole parameter on the CPU, from a generator that depends on its name and the seed alone:
    every mesh gets the same weights, and a rank holds one whole parameter at a time. Buffers must be real.
    """
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)
    for name, parameter in model.named_parameters():
        whole = value(name, parameter.shape, generator_of(name, seed))
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            mine = distribute_tensor(whole.to(device), mesh, placements, src_data_rank=None)
            parameter.to_local().copy_(mine.to_local())
        else:
            parameter.copy_(whole)


def generator_of(name: str, seed: int) -> torch.Generator:
    """A CPU generator for one parameter."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))


def _placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Split a parameter whose leading dim is 1 along another that divides: else one rank holds it whole."""
    if parameter.ndim < 2 or parameter.shape[0] != 1:
        return None
    return next((Shard(d) for d, size in enumerate(parameter.shape) if size > 1 and size % ranks == 0), None)


def _checkpoint_activations(block: nn.Module, kind: ActivationCheckpointing) -> None:
    # The method is replaced rather than the module wrapped, so that parameters keep their names.
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        kept = {getattr(torch.ops.aten, name).default for name in _KEPT_OPS}

        def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    block.forward = functools.partial(checkpoint, block.forward, **options)  # type: ignore[method-assign]


def _own_memory(_: nn.Module, inputs: Any, output: Any) -> Any:
    """Copy outputs of the root that are views: FSDP's backward hook sits on them, and views lose it."""
    return pytree.tree_map_only(Tensor, lambda x: x.clone() if x._is_view() else x, output)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory; a plain tensor is returned as it is.

    Ten times as fast under `torch.no_grad`.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, mesh: Mesh, sums: Tensor | None = None
) -> tuple[float, list[float]]:
    """Scale the gradients so that their norm over all ranks is at most `max_norm`; returns the norm before.

    `sums` (float32 `[n]`) is summed over all ranks in the same collective, and returned as floats: whatever
    else the ranks must agree on each step costs nothing extra. All ranks get the same numbers to the bit. A
    norm that is not finite, or a non-finite entry of `sums`, leaves the gradients alone. `max_norm` 0 or less
    does not clip. The collective is the one host synchronisation.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    norms = list(torch._foreach_norm(gradients, 2, dtype=torch.float32)) if gradients else []
    device = mesh.device_mesh.device_type
    square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
    # Shards of one replica make up the norm; every replica holds the same ones.
    packed = [square.reshape(1) / mesh.replicate] + ([] if sums is None else [sums])
    totals = torch.cat(packed)
    dist.all_reduce(totals)
    total, *others = totals.tolist()
    norm = total**0.5
    finite = all(map(_is_finite, totals.tolist()))
    if finite and 0 < max_norm < norm:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))  # as torch.nn.utils does
    return norm, others


def _is_finite(value: float) -> bool:
    return value - value == 0
