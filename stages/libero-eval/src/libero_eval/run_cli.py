"""`libero-eval run`: its options, and the server's address."""

import signal
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from flywheel_shared.errors import UserError
from libero_eval.settings import read_recipe


def run(
    output: Annotated[Path, typer.Option(help="Folder to write; appears when the evaluation is complete.")],
    server: Annotated[str | None, typer.Option(help="Policy server, ws://host:port.")] = None,
    server_file: Annotated[
        Path | None, typer.Option(help="File with the server's host:port; waited for while it is not there.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe (TOML); options override its values.")] = None,
    overrides: Annotated[list[str], typer.Option("--set", help="Override a key: --set run.execute=8.")] = [],  # noqa: B006
    suite: Annotated[str | None, typer.Option(help="libero_spatial, _object, _goal or _10.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Task ids, such as 0 or 0-3,7.")] = None,
    init_states: Annotated[str | None, typer.Option(help="Initial states, such as 36-49.")] = None,
    episodes_per_state: Annotated[int | None, typer.Option(help="Episodes from each initial state.")] = None,
    rate: Annotated[int | None, typer.Option(help="Actions a second, in Hz.")] = None,
    size: Annotated[int | None, typer.Option(help="Width and height of a view, in pixels.")] = None,
    rendering: Annotated[
        str | None, typer.Option(help="fast (no shadows, no multisampling) or full.")
    ] = None,
    execute: Annotated[int | None, typer.Option(help="Actions of a chunk to execute.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps after which an episode has failed.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the displacements.")] = None,
    spread_m: Annotated[
        float | None, typer.Option(help="Largest displacement of the object, in metres.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Simulators at once, a process each.")] = None,
    blank_cameras: Annotated[
        bool | None, typer.Option("--blank-cameras/--see", help="Send black images to the policy.")
    ] = None,
    render: Annotated[
        str | None, typer.Option(help="query: when the policy is asked; every-step: smooth videos.")
    ] = None,
    videos: Annotated[int | None, typer.Option(help="Episodes of which a video is kept.")] = None,
    request_timeout_s: Annotated[float | None, typer.Option(help="Longest wait for a reply.")] = None,
    episode_timeout_s: Annotated[float | None, typer.Option(help="Longest episode, in wall time.")] = None,
    reconnect_s: Annotated[float | None, typer.Option(help="How long to wait for a server.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an evaluation that exists.")
    ] = False,
) -> None:
    """Evaluate a policy closed loop: success rates with intervals, a row an episode, videos."""
    flags = {
        "simulator.suite": suite,
        "simulator.rate_hz": rate,
        "simulator.size": size,
        "simulator.rendering": rendering,
        "run.tasks": tasks,
        "run.init_states": init_states,
        "run.episodes_per_state": episodes_per_state,
        "run.execute": execute,
        "run.max_steps": max_steps,
        "run.seed": seed,
        "run.spread_m": spread_m,
        "run.workers": workers,
        "run.blank_cameras": blank_cameras,
        "run.render": render,
        "run.videos": videos,
        "run.request_timeout_s": request_timeout_s,
        "run.episode_timeout_s": episode_timeout_s,
        "run.reconnect_s": reconnect_s,
    }
    asked = read_recipe(recipe, overrides, flags)
    uri = server_uri(server, server_file, asked.run.reconnect_s)
    from libero_eval.evaluate import NothingEvaluated, evaluate

    signal.signal(signal.SIGTERM, _end)  # so that workers are stopped and nothing half-written stays
    try:
        results = evaluate(asked, uri, output, overwrite, lambda line: print(line, flush=True))
    except NothingEvaluated as error:
        print(f"libero-eval: nothing could be evaluated: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    overall = results["overall"]
    rate_once = overall["success_once"]
    low, high = rate_once["wilson_95"]
    print(
        f"{output}: success_once {rate_once['successes']} of {overall['episodes']} = {rate_once['rate']:.0%} "
        f"(95% interval {low:.0%} to {high:.0%}), success_at_end {overall['success_at_end']['successes']}"
    )
    if overall["not_evaluated"]:
        print(f"libero-eval: {overall['not_evaluated']} episodes could not be evaluated", file=sys.stderr)


def server_uri(server: str | None, server_file: Path | None, wait_s: float) -> str:
    """ws://host:port of the server that one of two options names; waits `wait_s` for the file to have it.

    Raises:
        UserError: where neither or both are given, or the file has no address.
    """
    if (server is None) == (server_file is None):
        raise UserError("give one of --server ws://host:port and --server-file FILE")
    if server_file is not None:
        give_up = time.monotonic() + wait_s
        while not (address := _read_address(server_file)):
            if time.monotonic() >= give_up:
                raise UserError(f"--server-file: {server_file} has no host:port; is the server up?")
            time.sleep(0.2)
        server = address
    assert server is not None
    return server if "://" in server else f"ws://{server}"


def _read_address(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def _end(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)
