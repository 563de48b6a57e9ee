"""The `flywheel` command."""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from flywheel_shared.errors import UserError, run_app

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)

Root = Annotated[Path, typer.Option("--root", help="Folder of the run: everything it makes lies under it.")]


@app.callback()
def _flywheel() -> None:
    """Record, train, convert, serve and evaluate: the whole loop with one command."""


@app.command()
def run(
    profile: Annotated[
        str, typer.Option(help="A name in infra/profiles, or a path of a .toml file.")
    ] = "laptop",
    root: Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/<profile>].")] = None,
    turns: Annotated[
        int, typer.Option(min=1, help="How often the loop is run, each turn on what the one before made.")
    ] = 1,
    start: Annotated[
        str | None, typer.Option("--from", help="Rerun from this step on; train@2 is turn 2's.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Rerun everything.")] = False,
) -> None:
    """Run a profile's steps in order; a second call goes on where the first one stopped."""
    from flywheel_infra import environments, runner
    from flywheel_infra.commands import StepFailed
    from flywheel_infra.profile import load_profile
    from flywheel_infra.progress import Progress

    steps = load_profile(profile)
    name = Path(profile).stem
    folder = (root or environments.ROOT / "runs" / name).absolute()
    for stop in (signal.SIGTERM, signal.SIGINT):  # a background job of a shell starts with SIGINT ignored
        signal.signal(stop, _stop)
    try:
        with Progress() as progress:
            runner.run(name, steps, turns, folder, start, fresh, progress)
            progress.say(_closing_lines(folder))
    except environments.SetupError as error:
        raise UserError(str(error)) from None
    except StepFailed as error:
        _fail(f"{error.tail}\n\nflywheel: {error}", 1)
    except KeyboardInterrupt:
        _fail("flywheel: stopped; the same command goes on from here", 130)


@app.command()
def report(
    root: Root, output: Annotated[Path | None, typer.Option(help="[default: <root>/report.html]")] = None
) -> None:
    """Write one self-contained page about a run: curves, videos, success, times, versions."""
    from flywheel_infra.report import write_report

    target = output or root / "report.html"
    write_report(root.absolute(), target)
    print(f"wrote {target} ({target.stat().st_size / 2**20:.1f} MiB)")


def _closing_lines(root: Path) -> str:
    from flywheel_infra.ledger import Ledger
    from flywheel_infra.run_folder import evaluations, titles

    ledger = Ledger.load(root)
    found = evaluations(root, ledger) if ledger else []
    lines = [f"{title}: {one.sentence()}" for title, one in zip(titles(found), found, strict=True)]
    page = root / "report.html"
    return "\n".join(["", *lines, *([f"report: {page}"] if page.is_file() else [])])


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> NoReturn:
    sys.stdout.flush()
    print(message, file=sys.stderr)
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the console script."""
    run_app(app, "flywheel")


if __name__ == "__main__":
    main()
