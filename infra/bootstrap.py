"""Run a command in a stage's environment, making that environment first where it must be made.

    python3 infra/bootstrap.py flywheel run --profile laptop
    python3 infra/bootstrap.py --test nox -l
    python3 infra/bootstrap.py --stage libero-eval libero-eval --help

Any Python from 3.8 on runs this file, with nothing installed.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from flywheel_infra import environments


def main() -> None:
    """Parse our own options, make the environment, and become the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", default="infra", help="whose environment (default: infra)")
    parser.add_argument("--test", action="store_true", help="with the packages that its tests need")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="a program of that environment and its arguments"
    )
    chosen = parser.parse_args()
    try:
        environment = environments.ensure(chosen.stage, chosen.test)
    except environments.SetupError as error:
        sys.exit(f"set-up: {error}")
    if not chosen.command:
        return
    program = environment / "bin" / chosen.command[0]
    if not program.exists():
        sys.exit(f"set-up: the environment of {chosen.stage} has no program named {chosen.command[0]}")
    os.environ["PATH"] = f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    os.execv(program, [str(program), *chosen.command[1:]])  # noqa: S606 - becoming the command is the point


if __name__ == "__main__":
    main()
