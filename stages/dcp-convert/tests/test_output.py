"""The output appears whole or not at all, replaces only what it may, and says when there is no room."""

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from dcp_convert import output
from dcp_convert.export import to_safetensors
from dcp_convert.inspection import inspect_path
from flywheel_shared.errors import UserError

LARGE_BYTES = 400_000_000
LARGEST_TENSOR_BYTES = 240_000_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A bare DCP folder of LARGE_BYTES with one tensor of LARGEST_TENSOR_BYTES."""
    folder = tmp_path_factory.mktemp("large") / "dcp"
    rest = {f"blocks.{i}.weight": torch.randn(2_000_000) for i in range(20)}
    dcp.save(rest | {"embedding": torch.randn(60_000, 1000)}, checkpoint_id=folder, no_dist=True)
    yield folder
    shutil.rmtree(folder)


MEASURE = r"""
import re, sys
from pathlib import Path
from dcp_convert.export import to_safetensors
if sys.argv[3] != "keep":
    import torch
    torch.ones(1000, 1000).to(torch.bfloat16)  # whatever threads and code a first cast brings in
# Not ru_maxrss: across an exec it keeps the peak of the process that started this one.
peak = lambda: int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before = peak()
to_safetensors(Path(sys.argv[1]), Path(sys.argv[2]), "auto", sys.argv[3], 5 * 10**9, False, print)
print(peak() - before)
"""


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_memory_does_not_grow_with_the_model_or_its_largest_tensor(large, tmp_path, dtype):
    command = [sys.executable, "-c", MEASURE, large, tmp_path / "out", dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    grown = int(done.stdout.splitlines()[-1])
    # Bands of 8 MiB: one read, one cast, one written, one in between, and the allocator's slack.
    assert 8e6 < grown < 150e6 < LARGEST_TENSOR_BYTES
    print(f"{dtype}: peak memory grew by {grown / 1e6:.0f} MB")
    shutil.rmtree(tmp_path / "out")  # pytest keeps what is left for three runs


def test_killed_conversion_leaves_no_output_and_can_be_repeated(large, start_tool, tmp_path, same_bits):
    out = tmp_path / "out"
    process = start_tool("to-safetensors", large, out)
    written = tmp_path / ".out.partial" / "model.safetensors"
    deadline = time.monotonic() + 60
    while not (written.exists() and written.stat().st_size > 1_000_000):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert not out.exists()
    assert written.stat().st_size < LARGE_BYTES
    assert start_tool("to-safetensors", large, out).wait(timeout=120) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    state = {name: torch.empty(value.shape) for name, value in load_file(out / "model.safetensors").items()}
    dcp.load(state, checkpoint_id=large, no_dist=True)
    assert same_bits(load_file(out / "model.safetensors"), state)
    shutil.rmtree(out)


def test_kill_at_any_moment_leaves_a_whole_output_or_none(sharded, start_tool, tmp_path):
    dice = random.Random(5)
    out = tmp_path / "exports" / "out"
    for _ in range(12):
        process = start_tool("to-safetensors", sharded.run, out, "--overwrite")
        time.sleep(dice.uniform(0.0, 1.2))
        process.kill()
        process.wait(timeout=60)
        assert not out.exists() or inspect_path(out).whole
    assert start_tool("to-safetensors", sharded.run, out, "--overwrite").wait(timeout=60) == 0
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_full_disk_ends_the_run_and_leaves_nothing(large, tmp_path, tool):
    def limit() -> None:  # a write past this size fails as one to a full disk does
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000_000, 100_000_000))

    result = tool("to-safetensors", large, tmp_path / "out", preexec_fn=limit)
    assert result.returncode == 1
    assert "OSError" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_missing_space_is_told_before_anything_is_written(sharded, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(UserError, match=r"needs 0\.\d+ GB, found 0\.000 GB free"):
        to_safetensors(sharded.run, tmp_path / "out", "auto", "keep", 10**9, False, lambda _: None)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()


def test_existing_output_is_kept_unless_asked(sharded, tool, tmp_path):
    out = tmp_path / "out"
    assert tool("to-safetensors", sharded.run, out).returncode == 0
    before = (out / "model.safetensors").stat().st_ino
    result = tool("to-safetensors", sharded.run, out)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "--overwrite" in result.stderr
    assert (out / "model.safetensors").stat().st_ino == before
    assert tool("to-safetensors", sharded.run, out, "--overwrite", "--dtype", "bfloat16").returncode == 0
    assert json.loads((out / "export.json").read_text())["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.glob("*out*")] == ["out"]


def test_failed_replacement_keeps_the_old_export(sharded, tool, tmp_path):
    out = tmp_path / "out"
    assert tool("to-safetensors", sharded.run, out).returncode == 0
    before = (out / "export.json").read_bytes()
    (sharded.iteration / "ema" / "__0_0.distcp").write_bytes(b"")
    assert tool("to-safetensors", sharded.iteration, out, "--overwrite").returncode == 2
    assert (out / "export.json").read_bytes() == before


def test_overwrite_deletes_exports_only(sharded, tool, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    result = tool("to-safetensors", sharded.run, tmp_path / "mine", "--overwrite")
    assert result.returncode == 2
    assert "not an export" in result.stderr
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"


def test_output_must_lie_apart_from_the_checkpoint(sharded, tool):
    for out in (sharded.iteration / "out", sharded.iteration, sharded.run.parent):
        result = tool("to-safetensors", sharded.iteration, out, "--overwrite")
        assert result.returncode == 2
    assert inspect_path(sharded.iteration).whole
    assert not (sharded.iteration / "out").exists()


def test_second_conversion_to_one_output_is_refused(sharded, tool, tmp_path):
    with output.OutputFolder(tmp_path / "out", overwrite=False):
        result = tool("to-safetensors", sharded.run, tmp_path / "out")
        assert result.returncode == 2
        assert "another conversion" in result.stderr
        assert (tmp_path / ".out.partial").is_dir()
    assert tool("to-safetensors", sharded.run, tmp_path / "out").returncode == 0


def test_file_descriptors_do_not_leak(sharded, tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    to_safetensors(sharded.run, tmp_path / "out", "auto", "keep", 1000, False, lambda _: None)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
