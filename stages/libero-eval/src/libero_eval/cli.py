"""The `libero-eval` command: record, run."""

import typer

from flywheel_shared.errors import run_app
from libero_eval.run_cli import run

app = typer.Typer(
    help="Record demonstrations in the LIBERO simulator; evaluate policies in it.",
    no_args_is_help=True,
    add_completion=False,
)
app.command()(run)


@app.callback()
def _verbs() -> None:
    """A verb is asked for even while there is only one."""


def main() -> None:
    """Run the console script."""
    run_app(app, "libero-eval")
