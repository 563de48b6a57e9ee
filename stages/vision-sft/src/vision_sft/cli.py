"""The `vision-sft` command: train."""

from pathlib import Path
from typing import Annotated

import typer

from flywheel_shared.errors import UserError, run_app

app = typer.Typer(
    help="Post-train the Cosmos 3 world model on clips.", no_args_is_help=True, add_completion=False
)


@app.callback()
def _verbs() -> None:
    """Post-train the Cosmos 3 world model on clips."""


@app.command()
def train(
    recipe: Annotated[
        Path, typer.Option("--recipe", help="A recipe (TOML): recipes/laptop.toml and others.")
    ],
    root: Annotated[Path, typer.Option(help="Root of clips/, checkpoints/ and export/.")] = Path(
        "runs/laptop"
    ),
    overrides: Annotated[
        list[str], typer.Option("--set", help="Override a key: --set trainer.max_steps=10.")
    ] = [],  # noqa: B006 - typer wants the default itself
    nproc: Annotated[int, typer.Option(help="Ranks to start on this machine, unless a launcher has.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    timeout_s: Annotated[float, typer.Option(help="Of every collective.")] = 600.0,
) -> None:
    """Train on clips, or continue: packed samples, FSDP2 over all ranks, asynchronous sharded checkpoints."""
    from flywheel_shared.recipe import load_recipe
    from vision_sft.recipe import Recipe

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device: {device!r}; allowed: auto, cpu, cuda")
    parsed = load_recipe(Recipe, recipe, overrides)
    from flywheel_shared.launch import distributed, launch_local, must_launch

    if must_launch(nproc):
        arguments = ["train", "--recipe", str(recipe), "--root", str(root), "--device", device]
        arguments += ["--timeout-s", str(timeout_s)]
        arguments += [word for override in overrides for word in ("--set", override)]
        raise typer.Exit(launch_local(nproc, "vision_sft", arguments))
    from vision_sft.train import train as run

    with distributed(device, timeout_s) as world:
        steps = run(parsed, root, world)
    if steps < parsed.trainer.max_steps:
        raise typer.Exit(143)  # stopped by SIGTERM, saved: a launcher must not take the run for done


def main() -> None:
    """Run the console script."""
    run_app(app, "vision-sft")
