"""Every check of the repository. `nox -l` lists them; `nox -s "tests(libero-eval)"` runs one.

Sessions run in the stages' own environments (.venv/<stage>, with their tests' packages), made on demand.
Whatever follows `--` goes to pytest: `nox -s "tests(infra)" -- -k runner`.
"""

from pathlib import Path

import nox

from flywheel_infra import environments, system

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "tests", "distributed", "simulator", "e2e"]

ROOT = Path(__file__).parent
RESULTS = ROOT / ".nox" / "results"  # JUnit files, summed by tests/run_all.py
OF_TESTS = ["chromium", "ffmpeg"]  # Debian packages that infra's tests and the end-to-end test need
# Package -> (its folder, the stage whose environment holds what it needs)
PACKAGES = {
    "shared": ("shared", "dreamzero-sft"),
    "infra": ("infra", "infra"),
    **{stage: (f"stages/{stage}", stage) for stage in environments.stages() if stage != "infra"},
}
UNIT = "not distributed and not simulator"
each_package = nox.parametrize("package", list(PACKAGES), ids=list(PACKAGES))


def environment(stage: str) -> str:
    """Interpreter of the stage's environment, made where it is not there yet."""
    try:
        system.ensure([*system.of_stage(stage), *(OF_TESTS if stage == "infra" else [])])
        return str(environments.ensure(stage, test=True) / "bin" / "python")
    except environments.SetupError as error:
        raise SystemExit(f"set-up: {error}") from None


def run_pytest(session: nox.Session, name: str, stage: str, *arguments: str) -> None:
    results = RESULTS / f"{name}.xml"
    # A session in which a marker selects nothing is no failure (pytest's code 5).
    session.run(
        environment(stage), "-m", "pytest", f"--junitxml={results}", *arguments, *session.posargs,
        external=True, success_codes=[0, 5],
    )  # fmt: skip


@nox.session
def lint(session: nox.Session) -> None:
    """Style and formatting of everything: ruff check, ruff format --check."""
    python = environment("infra")
    session.run(python, "-m", "ruff", "check", ".", external=True)
    session.run(python, "-m", "ruff", "format", "--check", ".", external=True)


@nox.session
@each_package
def types(session: nox.Session, package: str) -> None:
    """Static types of a package's sources: mypy, against the packages of its own environment."""
    folder, stage = PACKAGES[package]
    mypy = [environment("infra"), "-m", "mypy", "--python-executable", environment(stage)]
    session.run(*mypy, "--cache-dir", f".mypy_cache/{package}", f"{folder}/src", external=True)


@nox.session
@each_package
def tests(session: nox.Session, package: str) -> None:
    """Unit tests of a package."""
    folder, stage = PACKAGES[package]
    run_pytest(
        session, f"tests-{package}", stage, f"{folder}/tests", "-m", "not distributed and not simulator"
    )


@nox.session
@nox.parametrize(
    "package", ["shared", "dreamzero-sft", "vision-sft"], ids=["shared", "dreamzero-sft", "vision-sft"]
)
def distributed(session: nox.Session, package: str) -> None:
    """Tests on 2 and 4 processes: sharding, resuming, resharding."""
    folder, stage = PACKAGES[package]
    run_pytest(session, f"distributed-{package}", stage, f"{folder}/tests", "-m", "distributed")


@nox.session
def simulator(session: nox.Session) -> None:
    """Tests that step the LIBERO simulator."""
    run_pytest(session, "simulator", "libero-eval", "stages/libero-eval/tests", "-m", "simulator")


@nox.session
def e2e(session: nox.Session) -> None:
    """The whole repository: its rules, a short flywheel killed and restarted, its report in a browser."""
    run_pytest(session, "e2e", "infra", "tests")
