"""How a command ends: 0 done, 2 a user's mistake in one line, 1 a failed run with its cause first.

def main() -> None:
    run_app(app, "dreamzero-sft")
"""

import sys
import traceback
from typing import NoReturn

import typer


class UserError(Exception):
    """A mistake that the user can mend.

    The message is one line that names the file, the field, what was found and what to do.
    """


def run_app(app: typer.Typer, name: str) -> NoReturn:
    """Run a typer app as a console script and exit the process.

    `UserError` and a wrong command line print `name: message` on stderr and exit 2. `typer.Exit(code)` exits
    with its code, Ctrl-C with 130. Anything else prints its cause in one line, then the traceback, and
    exits 1.
    """
    try:
        result = app(prog_name=name, standalone_mode=False)
    except UserError as error:
        _end(name, str(error), 2)
    except Exception as error:
        # typer ships its own copy of click from 0.2x on, so its errors are known by what they can do.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            _end_with_usage(name, error)
        if type(error).__name__ == "Abort":
            _end(name, "aborted", 130)
        sys.stdout.flush()
        print(f"{name}: failed: {one_line(_describe(error))}", file=sys.stderr)
        traceback.print_exception(error)
        sys.exit(1)
    # Without standalone mode typer hands back the code of typer.Exit, or what the verb returned.
    sys.exit(result if isinstance(result, int) else 0)


def one_line(text: str) -> str:
    """Join the lines of `text` by spaces."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _describe(error: BaseException) -> str:
    """Name the error, and the one that it was raised from where there is one."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    return text if root is error else f"{text} (caused by {type(root).__name__}: {root})"


def _end_with_usage(name: str, error: Exception) -> NoReturn:
    message: str = error.format_message()  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    if "\n" in message:  # the whole help text: a command was called without a verb
        print(message, file=sys.stderr)
        sys.exit(2)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    _end(name, message + hint, 2)


def _end(name: str, message: str, code: int) -> NoReturn:
    sys.stdout.flush()
    print(f"{name}: {one_line(message)}", file=sys.stderr)
    sys.exit(code)
