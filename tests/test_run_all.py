"""The closing line of `make test`, read from what nox really reports."""

import subprocess
import sys

import pytest
import run_all

NOXFILE = """
import nox
nox.options.sessions = ["checks"]
@nox.session(python=False)
@nox.parametrize("part", ["good", "bad"], ids=["good", "bad"])
def checks(session, part):
    if part == "bad":
        session.error()
"""
JUNIT = '<testsuites><testsuite tests="5" failures="{}" errors="0" skipped="1"/></testsuites>'


@pytest.mark.parametrize(
    ("failures", "line"),
    [(1, "1 failed, 3 passed, 1 skipped in 2.00s"), (0, "4 passed, 1 skipped, 1 error in 2.00s")],
)
def test_a_failed_session_is_named_and_never_counts_as_success(tmp_path, monkeypatch, capsys, failures, line):
    (tmp_path / "noxfile.py").write_text(NOXFILE)
    (tmp_path / "one.xml").write_text(JUNIT.format(failures))
    report = tmp_path / "sessions.json"
    nox = subprocess.run([sys.executable, "-m", "nox", "--report", str(report)], cwd=tmp_path, check=False)
    assert nox.returncode == 1
    monkeypatch.setattr(run_all, "RESULTS", tmp_path)
    assert run_all.closing_line(report, 2).strip("= ") == line
    assert capsys.readouterr().out == "failed sessions: checks(bad)\n"
