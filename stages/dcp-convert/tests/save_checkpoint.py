"""Run as a script, once a rank: save a known state dict as real DCP folders.

usage: save_checkpoint.py FOLDER RANK WORLD_SIZE  (writes model, ema, optim and full.pt into FOLDER)
"""

import datetime
import faulthandler
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


class Model(nn.Module):
    """Shapes that split unevenly over two ranks, one that a rank gets none of, and buffers of odd kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 5) for _ in range(12))
        self.head = nn.Linear(3, 1)
        self.low = nn.Linear(6, 9, dtype=torch.bfloat16)
        self.register_buffer("count", torch.tensor(41))
        self.register_buffer("scale", torch.tensor(2.5, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("wide", torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last))
        self.register_buffer("turned", torch.randn(6, 11, dtype=torch.float64).t())


def main(folder: Path, rank: int, world_size: int) -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size, timeout=timeout
    )
    mesh = dist.init_device_mesh("cpu", (world_size,))
    torch.manual_seed(7)
    model = Model()
    columns, copied = torch.randn(5, 6), torch.randn(3, 3)
    full = {name: value.clone() for name, value in model.state_dict().items()}
    full |= {"columns.weight": columns, "copied.weight": copied}
    ema = {name: value * 2 if value.is_floating_point() else value for name, value in full.items()}
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    for other in (model.head, model.low):
        fully_shard(other, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = get_model_state_dict(model)  # shares storage, so taken and cloned before the step
    state = {name: value.clone() for name, value in state.items()}
    state["wide"], state["turned"] = full["wide"], full["turned"]  # keep strides that clone() may change
    state["columns.weight"] = distribute_tensor(columns, mesh, [Shard(1)])
    state["copied.weight"] = distribute_tensor(copied, mesh, [Replicate()])
    dcp.save(state, checkpoint_id=folder / "model")
    dcp.save(
        {name: value * 2 if value.is_floating_point() else value for name, value in state.items()},
        checkpoint_id=folder / "ema",
    )
    optimizer.step()
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder / "optim")
    if rank == 0:
        torch.save({"model": full, "ema": ema}, folder / "full.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
