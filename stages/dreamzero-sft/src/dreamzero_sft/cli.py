"""The `dreamzero-sft` command: metadata, train, serve."""

from pathlib import Path
from typing import Annotated

import typer

from flywheel_shared.errors import UserError, run_app

app = typer.Typer(
    help="Post-train and serve the DreamZero world-action model.", no_args_is_help=True, add_completion=False
)

RecipePath = Annotated[
    Path, typer.Option("--recipe", help="A recipe (TOML): recipes/laptop.toml and others.")
]
Root = Annotated[Path, typer.Option(help="Root of corpus/, metadata/, checkpoints/ and export/.")]
Overrides = Annotated[list[str], typer.Option("--set", help="Override a key: --set trainer.max_steps=10.")]


@app.command()
def metadata(
    recipe: RecipePath,
    root: Root = Path("runs/laptop"),
    overrides: Overrides = [],  # noqa: B006 - typer wants the default itself
    overwrite: Annotated[bool, typer.Option(help="Make it again where it exists.")] = False,
) -> None:
    """Compute a corpus' normalisation statistics and fit the video tokenizer on it."""
    from dreamzero_sft.metadata import make_metadata
    from dreamzero_sft.recipe import Recipe
    from flywheel_shared.recipe import load_recipe

    make_metadata(load_recipe(Recipe, recipe, overrides), root, overwrite)


@app.command()
def train(
    recipe: RecipePath,
    root: Root = Path("runs/laptop"),
    overrides: Overrides = [],  # noqa: B006
    nproc: Annotated[int, typer.Option(help="Ranks to start on this machine, unless a launcher has.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    timeout_s: Annotated[float, typer.Option(help="Of every collective.")] = 600.0,
) -> None:
    """Train on a corpus, or continue: FSDP2 over all ranks, asynchronous sharded checkpoints."""
    from dreamzero_sft.recipe import Recipe
    from flywheel_shared.recipe import load_recipe

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device: {device!r}; allowed: auto, cpu, cuda")
    parsed = load_recipe(Recipe, recipe, overrides)
    from flywheel_shared.launch import distributed, launch_local, must_launch

    if must_launch(nproc):
        arguments = ["train", "--recipe", str(recipe), "--root", str(root), "--device", device]
        arguments += ["--timeout-s", str(timeout_s)]
        arguments += [word for override in overrides for word in ("--set", override)]
        raise typer.Exit(launch_local(nproc, "dreamzero_sft", arguments))
    from dreamzero_sft.train import train as run

    with distributed(device, timeout_s) as world:
        steps = run(parsed, root, world)
    if steps < parsed.trainer.max_steps:
        raise typer.Exit(143)  # stopped by SIGTERM, saved: a launcher must not take the run for done


@app.command()
def serve(
    export: Annotated[Path, typer.Option(help="An export of dcp-convert to-safetensors.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    ready_file: Annotated[
        Path | None, typer.Option(help="File to write host:port to when requests are accepted.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps instead of the export's.")] = None,
) -> None:
    """Serve an export: OpenPI websocket at /, GET /healthz, /info, /metrics, POST /predict."""
    import torch

    from dreamzero_sft.policy import DreamZeroPolicy
    from flywheel_shared.policy_server import serve as run

    policy = DreamZeroPolicy(export, torch.device(device))
    if steps is not None:
        policy.sampler = policy.sampler.model_copy(update={"steps": steps})
    policy.warm_up()
    run(policy, host, port, ready_file=ready_file)


def main() -> None:
    """Run the console script."""
    run_app(app, "dreamzero-sft")
