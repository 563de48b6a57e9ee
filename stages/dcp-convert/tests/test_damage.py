"""A checkpoint that is not whole never becomes an export: one line says what is wrong, nothing is left."""

import json
import pickle
import random
import re
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from dcp_convert.export import to_safetensors
from flywheel_shared.errors import UserError


def fails(result, *parts: str) -> None:
    """Exit code 2 and one line without a traceback that holds all `parts`."""
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if "warning:" not in line and "%" not in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("dcp-convert: ")
    for part in parts:
        assert part in lines[0], (part, lines[0])


def convert(tool, source, tmp_path, *options):
    out = tmp_path / "exports" / "out"
    out.parent.mkdir()
    result = tool("to-safetensors", source, out, *options)
    assert list(out.parent.iterdir()) == [], "something is left"
    return result


@pytest.mark.parametrize("part", ["model", "ema", "optim"])
def test_truncated_shard_is_named_with_both_sizes(sharded, tool, tmp_path, part):
    shard = sharded.iteration / part / "__1_0.distcp"
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 100)
    fails(convert(tool, sharded.iteration, tmp_path), str(shard), f"found {size - 100}", f"expected {size}")


@pytest.mark.parametrize(
    "file", ["ema/__0_0.distcp", "ema/__1_0.distcp", "ema/.metadata", "assets/config.json"]
)
@pytest.mark.parametrize("seed", range(3))
def test_flipped_bit_is_named_with_both_sums(sharded, tool, tmp_path, file, seed):
    path = sharded.iteration / file
    content = bytearray(path.read_bytes())
    place = random.Random(seed).randrange(len(content))
    content[place] ^= 1 << (place % 8)
    path.write_bytes(content)
    result = convert(tool, sharded.iteration, tmp_path)
    fails(result, str(path))
    assert re.search(r"found sha256 [0-9a-f]{64}, expected [0-9a-f]{64}", result.stderr)


def test_damage_outside_of_what_is_read_does_not_matter(sharded, tool, tmp_path):
    path = sharded.iteration / "optim" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)
    assert tool("to-safetensors", sharded.iteration, tmp_path / "out").returncode == 0


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_missing_file_is_named(sharded, tool, tmp_path, name):
    (sharded.iteration / "ema" / name).unlink()
    fails(convert(tool, sharded.iteration, tmp_path), str(sharded.iteration / "ema" / name), "missing")


def test_without_commit_a_checkpoint_is_not_whole(sharded, tool, tmp_path):
    (sharded.iteration / "commit.json").unlink()
    fails(convert(tool, sharded.iteration, tmp_path), str(sharded.iteration), "no commit.json")


def test_save_in_progress_is_refused(sharded, tool, tmp_path):
    tmp = sharded.iteration.rename(sharded.iteration.with_name("iter_000000100.tmp"))
    fails(convert(tool, tmp, tmp_path), str(tmp), "did not finish")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not readable as JSON"),
        ("[]", "not a commit of format 1"),
        ('{"format": 2, "step": 1, "files": {}}', "format 2"),
        ('{"format": 1, "step": 1, "files": {"../../secret": {"bytes": 1, "sha256": ""}}}', "outside"),
        ('{"format": 1, "step": 1, "files": {}}', "not listed"),
    ],
)
def test_bad_commit_is_refused(sharded, tool, tmp_path, content, said):
    (sharded.iteration / "commit.json").write_text(content)
    fails(convert(tool, sharded.iteration, tmp_path), "commit.json", said)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_bare_folder_with_a_missing_file_is_refused(sharded, tool, tmp_path, name):
    bare = shutil.copytree(sharded.iteration / "model", tmp_path / "bare")
    (bare / name).unlink()
    fails(convert(tool, bare, tmp_path), str(bare / name), "missing")


def test_bare_folder_with_a_truncated_shard_is_refused(sharded, tool, tmp_path):
    bare = shutil.copytree(sharded.iteration / "model", tmp_path / "bare")
    size = (bare / "__0_0.distcp").stat().st_size
    with (bare / "__0_0.distcp").open("r+b") as file:
        file.truncate(size // 2)
    fails(
        convert(tool, bare, tmp_path), "__0_0.distcp", f"found {size // 2}", f"expected {size}", "truncated"
    )


@pytest.mark.parametrize("seed", range(40))
def test_damaged_index_never_ends_in_a_traceback(sharded, tmp_path, seed):
    """Without a commit to compare with: any error is a UserError, whatever the damage."""
    bare = shutil.copytree(sharded.iteration / "model", tmp_path / "bare")
    dice = random.Random(seed)
    # Values may not be recognised as damaged, so only the index and the archives' frames are aimed at.
    path = bare / ".metadata"
    content = bytearray(path.read_bytes())
    for _ in range(dice.randrange(1, 8)):
        content[dice.randrange(len(content))] = dice.randrange(256)
    path.write_bytes(content[: dice.randrange(1, len(content))] if seed % 4 == 0 else content)
    try:
        to_safetensors(bare, tmp_path / "out", "auto", "keep", 10**9, False, lambda _: None)
    except UserError:
        assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("seed", range(20))
def test_damaged_archive_never_ends_in_a_traceback(sharded, tmp_path, seed):
    bare = shutil.copytree(sharded.iteration / "model", tmp_path / "bare")
    dice = random.Random(seed)
    path = bare / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    for _ in range(60):
        content[dice.randrange(len(content))] = dice.randrange(256)
    path.write_bytes(content)
    try:
        to_safetensors(bare, tmp_path / "out", "auto", "keep", 10**9, False, lambda _: None)
    except UserError:
        assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


class _Runs:
    """Unpickled by the usual unpickler, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_index_that_would_run_code_is_refused(sharded, tool, tmp_path):
    bare = shutil.copytree(sharded.iteration / "model", tmp_path / "bare")
    (bare / ".metadata").write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
    fails(convert(tool, bare, tmp_path), ".metadata", "refused")
    fails(tool("inspect", bare), ".metadata", "refused")
    assert not (tmp_path / "ran").exists()


def test_index_that_leaves_the_folder_is_refused(sharded, tool, tmp_path):
    bare = shutil.copytree(sharded.iteration / "model", tmp_path / "bare")
    metadata = dcp.FileSystemReader(bare).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = "../" + place.relative_path
    (bare / ".metadata").write_bytes(pickle.dumps(metadata))
    fails(convert(tool, bare, tmp_path), ".metadata", "outside of the folder")


def test_tensor_with_a_missing_chunk_is_refused(sharded, tool, tmp_path):
    bare = shutil.copytree(sharded.iteration / "model", tmp_path / "bare")
    metadata = dcp.FileSystemReader(bare).read_metadata()
    metadata.state_dict_metadata["blocks.3.weight"].chunks.pop()
    (bare / ".metadata").write_bytes(pickle.dumps(metadata))
    fails(convert(tool, bare, tmp_path), "blocks.3.weight", "hold 21 of 35 elements")


def test_value_that_does_not_fit_the_cast_is_refused(tmp_path):
    dcp.save({"big": torch.tensor([1.0, 7e4])}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UserError, match=r"tensor big: 70000 does not fit float16 \(largest: 65504\)"):
        to_safetensors(tmp_path / "dcp", tmp_path / "out", "auto", "float16", 10**9, False, print)
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def test_infinities_survive_a_cast(tmp_path):
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0])
    dcp.save({"x": values}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    to_safetensors(tmp_path / "dcp", tmp_path / "out", "auto", "float16", 10**9, False, print)
    found = load_file(tmp_path / "out" / "model.safetensors")["x"]
    assert torch.equal(found.view(torch.int16), values.half().view(torch.int16))


def test_type_unknown_to_safetensors_is_refused(tmp_path, tool):
    dcp.save({"z": torch.zeros(2, dtype=torch.complex128)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    fails(convert(tool, tmp_path / "dcp", tmp_path), "tensor z", "complex128")


def test_asset_must_not_hide_the_weights(sharded, tool, tmp_path):
    (sharded.iteration / "assets" / "model.safetensors").write_bytes(b"")
    fails(convert(tool, sharded.iteration, tmp_path), "assets/model.safetensors", "rename")


def test_asset_link_must_not_leave_the_checkpoint(sharded, tool, tmp_path):
    (tmp_path / "secret").write_text("x")
    (sharded.iteration / "assets" / "link").symlink_to(tmp_path / "secret")
    fails(convert(tool, sharded.iteration, tmp_path), "assets/link", "outside")


def test_stale_latest_falls_back_to_the_newest_whole_one(sharded, tool, tmp_path, add_iteration):
    whole = add_iteration(sharded, 200)
    broken = add_iteration(sharded, 300)
    (broken / "commit.json").unlink()
    (sharded.run / "latest_checkpoint.txt").write_text("iter_000000300\n")
    result = tool("to-safetensors", sharded.run, tmp_path / "out")
    assert result.returncode == 0
    assert "warning" in result.stderr
    assert "no commit.json" in result.stderr
    assert f"taking {whole.name}" in result.stderr
    assert json.loads((tmp_path / "out" / "export.json").read_text())["source"]["step"] == 200


@pytest.mark.parametrize("content", [None, "../../etc\n", "iter_000000777\n", ""])
def test_bad_latest_falls_back_with_a_warning(sharded, tool, tmp_path, content):
    pointer = sharded.run / "latest_checkpoint.txt"
    pointer.unlink()
    if content is not None:
        pointer.write_text(content)
    result = tool("to-safetensors", sharded.run, tmp_path / "out")
    assert result.returncode == 0
    assert "latest_checkpoint.txt" in result.stderr
    assert "taking iter_000000100" in result.stderr


def test_run_without_a_whole_checkpoint_is_refused(sharded, tool, tmp_path):
    (sharded.iteration / "commit.json").unlink()
    fails(convert(tool, sharded.run, tmp_path), "no commit.json", "no other checkpoint")


def test_missing_ema_is_named(sharded, tool, tmp_path):
    commit = json.loads((sharded.iteration / "commit.json").read_text())
    commit["files"] = {name: x for name, x in commit["files"].items() if not name.startswith("ema/")}
    (sharded.iteration / "commit.json").write_text(json.dumps(commit))
    shutil.rmtree(sharded.iteration / "ema")
    fails(convert(tool, sharded.iteration, tmp_path, "--weights", "ema"), "ema", "missing", "--weights ema")


def test_average_that_lacks_buffers_is_refused(sharded, tool, tmp_path, recommit):
    """As left by a trainer that averages parameters and nothing else."""
    averaged = {name: value for name, value in sharded.ema.items() if name not in ("count", "mask")}
    shutil.rmtree(sharded.iteration / "ema")
    dcp.save(averaged, checkpoint_id=sharded.iteration / "ema", no_dist=True)
    recommit(sharded.iteration, 100)
    fails(
        convert(tool, sharded.iteration, tmp_path),
        "ema",
        "lacks 2 of the 36",
        "count, mask",
        "--weights model",
    )
    assert tool("to-safetensors", sharded.iteration, tmp_path / "out", "--weights", "model").returncode == 0


def test_wrong_sources_are_named(tool, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    for name, said in {
        "nothing": "no such file",
        "empty": "found no .metadata",
        "file.txt": "neither",
    }.items():
        fails(tool("to-safetensors", tmp_path / name, tmp_path / "out"), str(tmp_path / name), said)
        fails(tool("inspect", tmp_path / name), str(tmp_path / name), said)


@pytest.mark.parametrize("text", ["0", "-1", "5XB", "many"])
def test_wrong_sizes_are_named(sharded, tool, tmp_path, text):
    result = tool("to-safetensors", sharded.run, tmp_path / "out", f"--max-shard-size={text}")
    fails(result, "--max-shard-size", text)
