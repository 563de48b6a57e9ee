"""Rules that hold for the whole repository, read off its files."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAGES = sorted(path.parent for path in ROOT.glob("stages/*/pyproject.toml"))
PACKAGES = [ROOT / "shared", ROOT / "infra", *STAGES]
MODULES = {package: next((package / "src").glob("*/__init__.py")).parent.name for package in PACKAGES}


def tracked(pattern="*"):
    listed = subprocess.run(
        ["git", "ls-files", "-z", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def name_of(package):
    return package.name


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).partition(".")[0]


@pytest.mark.parametrize("package", PACKAGES, ids=name_of)
def test_no_package_imports_another_stage(package):
    others = {module for other, module in MODULES.items() if other not in (package, ROOT / "shared")}
    offenders = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in package.rglob("*.py")
        for module in imports(path)
        if module in others
    ]
    assert offenders == []


@pytest.mark.parametrize("stage", STAGES, ids=name_of)
def test_every_stage_has_the_same_files(stage):
    wanted = ["pyproject.toml", "requirements.lock", "requirements-test.lock", "stage.toml", "README.md"]
    wanted += ["tests", f"src/{MODULES[stage]}/__init__.py", f"src/{MODULES[stage]}/cli.py"]
    assert [name for name in wanted if not (stage / name).exists()] == []
    project = tomllib.loads((stage / "pyproject.toml").read_text())["project"]
    assert project["name"] == stage.name
    assert project["scripts"] == {stage.name: f"{MODULES[stage]}.cli:main"}


@pytest.mark.parametrize("stage", STAGES, ids=name_of)
def test_every_console_script_answers_quickly(stage):
    """Heavy imports lie inside functions: --help must not wait for torch or the simulator."""
    heavy = {"torch", "lerobot", "mujoco", "robosuite", "diffusers", "transformers"}
    code = f"import sys, {MODULES[stage]}.cli; print(sorted({heavy} & set(sys.modules)))"
    python = ROOT / ".venv" / stage.name / "bin" / "python"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("package", [*STAGES, ROOT / "infra"], ids=name_of)
def test_locks_pin_by_hash_and_name_no_registry(package):
    for name in ("requirements.lock", "requirements-test.lock"):
        text = (package / name).read_text()
        assert "://" not in text, name
        requirements = re.split(r"\n(?=\S)", text.strip())
        unpinned = [
            line for line in requirements if not line.startswith("#") and "--hash=sha256:" not in line
        ]
        assert unpinned == [], name


@pytest.mark.parametrize("package", [*STAGES, ROOT / "infra"], ids=name_of)
def test_the_lock_for_tests_is_a_superset_with_the_same_versions(package):
    plain, test = (
        dict(re.findall(r"^(\S+)==(\S+)", (package / name).read_text(), flags=re.MULTILINE))
        for name in ("requirements.lock", "requirements-test.lock")
    )
    assert {name: test.get(name) for name in plain} == plain


def test_no_generated_lock_or_output_is_tracked():
    names = [path.relative_to(ROOT) for path in tracked()]
    assert [name for name in names if name.name == "uv.lock" or name.parts[0] in ("runs", ".venv")] == []


def test_no_tracked_file_is_large():
    """Weights, videos and datasets are made, not kept; a fixture of a few hundred KiB is fine."""
    large = [str(path.relative_to(ROOT)) for path in tracked() if path.stat().st_size > 2**20]
    assert large == []


def test_no_file_names_a_folder_of_one_machine():
    home = re.compile(r"/(?:home|Users|root)/[A-Za-z0-9._-]+")
    offenders = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tracked()
        if path.suffix in {".py", ".toml", ".md", ".yaml", ".cfg", ""} and path != Path(__file__)
        for match in [home.search(path.read_text(errors="ignore"))]
        if match
    ]
    assert offenders == []


def test_make_targets_are_one_line():
    text = (ROOT / "Makefile").read_text()
    recipes = re.findall(r"^([a-z]+):.*\n((?:\t.*\n?)*)", text, flags=re.MULTILINE)
    assert {name: lines.count("\n\t") + 1 for name, lines in recipes} == {name: 1 for name, _ in recipes}
    assert {"flywheel", "test", "lint", "run"} <= {name for name, _ in recipes}


def test_every_link_of_the_documentation_leads_somewhere():
    broken = []
    for page in tracked("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|src=\"([^\"]+)\"", page.read_text()):
            link = target[0] or target[1]
            if "://" not in link and not (page.parent / link).exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_packages_do_not_trust_pickles():
    """torch.load without weights_only=True, pickle.load and allow_pickle=True run what they read."""
    calls = re.compile(r"\bpickle\.loads?\(|allow_pickle=True|torch\.load\((?![^)]*weights_only=True)")
    offenders = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for package in PACKAGES
        for path in (package / "src").rglob("*.py")
        for match in [calls.search(path.read_text())]
        if match
    ]
    assert offenders == []


def test_nox_lists_a_session_for_every_package():
    listed = subprocess.run(
        [sys.executable, "-m", "nox", "--list"], cwd=ROOT, capture_output=True, text=True, timeout=60
    ).stdout
    for package in PACKAGES:
        assert f"tests({package.name})" in listed
        assert f"types({package.name})" in listed
