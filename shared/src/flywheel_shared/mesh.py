"""Which ranks share which part of the work: one object answers for the whole run."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flywheel_shared.errors import UserError
from flywheel_shared.launch import World, quiet_gloo

AXES = ("replicate", "shard", "context")


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of the axes, their product being the number of ranks; `shard` -1 takes what is left.

    replicate: ranks that hold copies of the same parameters (HSDP when `shard` is more than 1).
    shard: ranks over which parameters, gradients and optimiser state are split.
    context: ranks that share one sample's sequence. Parameters are split over these as well.
    """

    replicate: int = 1
    shard: int = -1
    context: int = 1

    def build(self, world: World) -> "Mesh":
        """Check the degrees against the number of ranks and build the mesh; raises `UserError`."""
        for axis in ("replicate", "context"):
            if getattr(self, axis) < 1:
                raise UserError(f"parallel.{axis} is {getattr(self, axis)}, expected 1 or more")
        others = self.replicate * self.context
        if self.shard != -1 and self.shard < 1:
            raise UserError(f"parallel.shard is {self.shard}, expected 1 or more, or -1 for what is left")
        shard = world.world_size // others if self.shard == -1 else self.shard
        if shard * others != world.world_size or shard < 1:
            asked = "what is left" if self.shard == -1 else str(self.shard)
            raise UserError(
                f"parallel: replicate {self.replicate} x shard {asked} x context {self.context} does not "
                f"make {world.world_size} ranks"
            )
        degrees = (self.replicate, shard, self.context)
        with quiet_gloo():
            return Mesh(init_device_mesh(world.device.type, degrees, mesh_dim_names=AXES))


class Mesh:
    """The ranks of a run as a grid with the axes replicate, shard and context."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.device_mesh = device_mesh
        self.replicate, self.shard, self.context = device_mesh.shape
        split = "shard"
        if self.context > 1:
            # Made here once: flattening makes a process group, on all ranks in the same order.
            device_mesh["shard", "context"]._flatten("shard_context")
            split = "shard_context"
        self._fsdp = device_mesh["replicate", split] if self.replicate > 1 else device_mesh[split]

    @property
    def fsdp(self) -> DeviceMesh:
        """What `fully_shard` takes: one axis, or (replicate, shard) for HSDP."""
        return self._fsdp

    @property
    def context_mesh(self) -> DeviceMesh:
        """The ranks that share this rank's samples."""
        return self.device_mesh["context"]

    @property
    def data_degree(self) -> int:
        """Number of ranks, or groups of context ranks, that get samples of their own."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """Which of them this rank belongs to: what a data loader shards by."""
        replicate, shard, _ = self._coordinate()
        return replicate * self.shard + shard

    @property
    def context_rank(self) -> int:
        """Place among the ranks that share a sample."""
        return self._coordinate()[2]

    def _coordinate(self) -> tuple[int, int, int]:
        coordinate = self.device_mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"rank {dist.get_rank()} is not on the mesh")
        replicate, shard, context = coordinate
        return replicate, shard, context
