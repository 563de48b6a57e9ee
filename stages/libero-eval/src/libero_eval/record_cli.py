"""The command line of `libero-eval record`."""

from pathlib import Path
from typing import Annotated

import typer

from libero_eval.settings import read_recipe


def record(
    output: Annotated[Path, typer.Option(help="Folder of the dataset (LeRobot v3).")],
    recipe: Annotated[Path | None, typer.Option(help="A recipe (TOML); options below change it.")] = None,
    overrides: Annotated[list[str], typer.Option("--set", help="Change a key: --set record.seed=1.")] = [],  # noqa: B006
    suite: Annotated[str | None, typer.Option(help="libero_spatial, ...")] = None,
    tasks: Annotated[str | None, typer.Option(help="Task ids: 0,2-4.")] = None,
    init_states: Annotated[str | None, typer.Option(help="Initial states: 0-35.")] = None,
    episodes: Annotated[int | None, typer.Option(help="Attempts a task.")] = None,
    rate: Annotated[int | None, typer.Option(help="Actions a second.")] = None,
    size: Annotated[int | None, typer.Option(help="Pixels of a square view.")] = None,
    rendering: Annotated[str | None, typer.Option(help="fast or full.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same bytes of actions and states.")] = None,
    noise: Annotated[
        float | None, typer.Option(help="Disturbance of the executed action; 0 is none.")
    ] = None,
    spread_m: Annotated[float | None, typer.Option(help="Largest displacement of the object (m).")] = None,
    workers: Annotated[int | None, typer.Option(help="Simulators at once, a process each.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the output where it exists.")] = False,
) -> None:
    """Record demonstrations of the scripted expert; only what the simulator calls a success is kept."""
    flags = {
        "simulator.suite": suite,
        "simulator.rate_hz": rate,
        "simulator.size": size,
        "simulator.rendering": rendering,
        "record.tasks": tasks,
        "record.init_states": init_states,
        "record.episodes": episodes,
        "record.seed": seed,
        "record.noise": noise,
        "record.spread_m": spread_m,
        "record.workers": workers,
    }
    asked = read_recipe(recipe, overrides, flags)
    from libero_eval.record import record_corpus

    kept, failed = record_corpus(asked.simulator, asked.record, output, overwrite)
    print(f"{output}: {kept} demonstrations kept, {failed} attempts failed")
