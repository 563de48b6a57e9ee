"""Debian packages that a stage needs: looked for by trying, installed as root, else named exactly.

A stage lists them in its stage.toml: `[system]`, `debian = ["libegl1", "ffmpeg"]`.
"""

import ctypes.util
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable

from flywheel_infra.environments import SetupError, folder_of

# What shows that a package's content is there, on any distribution. Others are asked of dpkg.
LIBRARIES = {"libegl1": "EGL", "libgl1": "GL", "libosmesa6": "OSMesa"}
PROGRAMS = {"ffmpeg": "ffmpeg", "chromium": "chromium"}


def of_stage(stage: str) -> list[str]:
    """Debian packages that the stage's stage.toml names."""
    path = folder_of(stage) / "stage.toml"
    if not path.is_file():
        return []
    packages = tomllib.loads(path.read_text()).get("system", {}).get("debian", [])
    if not isinstance(packages, list) or not all(isinstance(package, str) for package in packages):
        raise SetupError(f"{path}: system.debian must be a list of package names, found {packages!r}")
    return packages


def is_present(package: str) -> bool:
    """Whether the package's library loads or its program exists; dpkg's word for packages not known here."""
    if package in LIBRARIES:
        return ctypes.util.find_library(LIBRARIES[package]) is not None
    if package in PROGRAMS:
        return shutil.which(PROGRAMS[package]) is not None
    if shutil.which("dpkg-query") is None:
        return False
    asked = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package],
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() == "installed"


def ensure(packages: Iterable[str]) -> None:
    """Install what is missing where that is possible, else raise SetupError with the command to run."""
    missing = [package for package in dict.fromkeys(packages) if not is_present(package)]
    if not missing:
        return
    names = " ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(
            f"system packages are missing; run: sudo apt-get install -y --no-install-recommends {names}"
        )
    print(f"set-up: installing Debian packages: {names}", file=sys.stderr, flush=True)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
        done = subprocess.run(
            ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120", *command],
            env=quiet,
            stdout=sys.stderr,
            check=False,
        )
        if done.returncode != 0 and command != ["update"]:
            raise SetupError(f"apt-get could not install {names}; its message is above")
    still = [package for package in missing if not is_present(package)]
    if still:
        raise SetupError(f"apt-get installed {names}, yet these are not found: {' '.join(still)}")
