"""A command that starts its own ranks, for the tests of the launcher: python -m launched MODE FOLDER."""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import typer

from flywheel_shared.errors import UserError, run_app
from flywheel_shared.launcher import launch_local, must_launch

app = typer.Typer(add_completion=False)


@app.command()
def main(mode: str, folder: Path, nproc: int = 2) -> None:
    if must_launch(nproc):
        raise typer.Exit(launch_local(nproc, "launched", sys.argv[1:]))
    rank = int(os.environ["RANK"])
    if mode == "stop":
        signal.signal(signal.SIGTERM, lambda *_: save_slowly(folder, rank))
        (folder / f"ready{rank}").touch()
        time.sleep(60)
    if mode == "environment":
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
        (folder / f"{rank}.txt").write_text(" ".join(os.environ[name] for name in names))
        print("a warning", file=sys.stderr)
        return
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)
    from flywheel_shared.launch import distributed

    with distributed("cpu", timeout_s=60) as world:
        import torch.distributed as dist

        sys.stdout.write(f"hello from {rank}\n")  # print() would write the newline apart: ranks share a pipe
        sys.stdout.flush()
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        if world.rank == 1:
            if mode == "mistake":
                raise UserError("recipe.toml: trainer.x: found 3; allowed: 4")
            if mode == "slow-mistake":  # another rank fails of this one's absence before it has ended
                atexit.register(time.sleep, 2)
                raise UserError("recipe.toml: trainer.x: found 3; allowed: 4")
            if mode == "crash":
                raise ValueError("rank 1 is the cause")
        if mode == "orphan":
            time.sleep(60)
        dist.barrier()


def save_slowly(folder: Path, rank: int) -> None:
    time.sleep(1.5)
    (folder / f"saved{rank}").touch()
    os._exit(143 if (folder / "expect143").exists() else 0)


if __name__ == "__main__":
    run_app(app, "launched")
