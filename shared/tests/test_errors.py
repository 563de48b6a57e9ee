import subprocess
import sys

import pytest

APP = """
import typer
from flywheel_shared.errors import UserError, run_app

app = typer.Typer()

@app.callback()
def root() -> None: ...

@app.command()
def wrong() -> None:
    raise UserError("data.toml: fps: found 0;\\nset it to 1 or more")

@app.command()
def broken() -> None:
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise RuntimeError("the third step failed") from error

@app.command()
def fine(count: int = 1) -> None:
    print("done", count)

@app.command()
def leave() -> None:
    raise typer.Exit(7)

@app.command()
def interrupted() -> None:
    raise KeyboardInterrupt

run_app(app, "demo")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", APP, *arguments], capture_output=True, text=True, timeout=60)


def test_user_error_is_one_line_and_exit_2():
    done = run("wrong")
    assert done.returncode == 2
    assert done.stderr == "demo: data.toml: fps: found 0; set it to 1 or more\n"


def test_failed_run_names_its_cause_before_the_traceback_and_exits_1():
    done = run("broken")
    assert done.returncode == 1
    first, second = done.stderr.splitlines()[:2]
    assert first == (
        "demo: failed: RuntimeError: the third step failed (caused by ZeroDivisionError: division by zero)"
    )
    assert second.startswith("Traceback")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["fine", "--cont", "2"], "No such option"), (["fine", "--count", "x"], "--count"), (["go"], "go")],
)
def test_wrong_command_line_is_one_line_and_exit_2(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("demo: ")
    assert words in done.stderr
    assert "--help" in done.stderr


def test_success_exit_code_and_interrupt_pass_through():
    done = run("fine", "--count", "3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done 3\n", "")
    assert run("leave").returncode == 7
    assert run("interrupted").returncode == 130


def test_help_exits_0():
    done = run("--help")
    assert done.returncode == 0
    assert "broken" in done.stdout
