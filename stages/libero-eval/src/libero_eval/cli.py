"""The `libero-eval` command: record, run."""

import typer

from flywheel_shared.errors import run_app
from libero_eval.record_cli import record
from libero_eval.run_cli import run

app = typer.Typer(
    help="Record demonstrations in the LIBERO simulator; evaluate policies in it.",
    no_args_is_help=True,
    add_completion=False,
)
app.command()(record)
app.command()(run)


def main() -> None:
    """Run the console script."""
    run_app(app, "libero-eval")
