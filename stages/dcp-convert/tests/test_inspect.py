"""`inspect` tells what is there and whether it is whole, of every kind of folder."""

import json
import math

import pytest
from rich.console import Console

from dcp_convert.inspection import inspect_path
from dcp_convert.tree import show


def inspected(tool, path):
    result = tool("inspect", path, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_checkpoint_is_shown_with_its_parts_and_sums(sharded, tool):
    found = inspected(tool, sharded.iteration)
    assert (found["kind"], found["whole"], found["step"]) == ("iteration", True, 100)
    parts = {part["name"]: part for part in found["parts"]}
    assert parts.keys() == {"model", "ema", "optim"}
    model = parts["model"]
    assert {x["name"]: (x["shape"], x["dtype"], x["bytes"]) for x in model["tensors"]} == {
        name: (list(value.shape), str(value.dtype).removeprefix("torch."), value.nbytes)
        for name, value in sharded.model.items()
    }
    assert model["elements"] == sum(value.numel() for value in sharded.model.values())
    assert model["elements_by_module"]["blocks"] == 12 * (7 * 5 + 5)
    assert sum(model["elements_by_module"].values()) == model["elements"]
    assert "trainer/trainer.json" in found["files"]
    # Of AdamW: a step and two moments of each of the 28 parameters; hyperparameters are no tensors.
    assert sum("exp_avg" in x["name"] for x in parts["optim"]["tensors"]) == 2 * 28
    assert any(name.endswith("lr") for name in parts["optim"]["objects"])


def test_sharding_is_counted(sharded, unsharded, tool):
    chunks = {
        x["name"]: x["chunks"] for x in inspected(tool, sharded.iteration / "model")["parts"][0]["tensors"]
    }
    assert chunks["blocks.0.weight"] == 2
    assert chunks["columns.weight"] == 2
    assert chunks["head.weight"] == 1  # one row: the second rank has none
    assert chunks["copied.weight"] == 1
    assert chunks["nothing"] == 0
    whole = inspected(tool, unsharded.iteration / "model")["parts"][0]["tensors"]
    assert {x["chunks"] for x in whole if math.prod(x["shape"])} == {1}


@pytest.mark.parametrize("damage", ["truncated", "no commit", "no index", "missing"])
def test_checkpoint_that_is_not_whole_says_why(sharded, tool, damage):
    ema = sharded.iteration / "ema"
    if damage == "truncated":
        (ema / "__0_0.distcp").write_bytes(b"short")
    elif damage == "no commit":
        (sharded.iteration / "commit.json").unlink()
    elif damage == "no index":
        (ema / ".metadata").unlink()
    else:
        (ema / "__1_0.distcp").unlink()
    found = inspected(tool, sharded.iteration)
    assert found["whole"] is False
    expected = {"truncated": "found 5 bytes", "no commit": "no commit.json"}.get(damage, "missing, expected")
    assert expected in found["reason"]
    text = tool("inspect", sharded.iteration)
    assert text.returncode == 0
    assert "NOT whole" in text.stdout


def test_run_lists_its_checkpoints(sharded, tool, add_iteration):
    add_iteration(sharded, 200)
    (add_iteration(sharded, 300) / "commit.json").unlink()
    found = inspected(tool, sharded.run)
    rows = [(row["name"], row["whole"], row["latest"]) for row in found["checkpoints"]]
    assert rows == [
        ("iter_000000300", False, False),
        ("iter_000000200", True, False),
        ("iter_000000100", True, True),
    ]
    assert (found["kind"], found["step"]) == ("run", 100)
    assert "iter_000000300" in tool("inspect", sharded.run).stdout


def test_export_is_shown_like_the_weights_it_holds(sharded, tool, tmp_path):
    out = tmp_path / "out"
    assert tool("to-safetensors", sharded.run, out, "--max-shard-size", "1KB").returncode == 0
    found = inspected(tool, out)
    assert (found["kind"], found["whole"], found["step"]) == ("safetensors", True, 100)
    weights = inspected(tool, sharded.iteration / "ema")["parts"][0]
    assert found["parts"][0]["elements_by_module"] == weights["elements_by_module"]
    shapes = [
        {x["name"]: (x["shape"], x["dtype"]) for x in part["tensors"]}
        for part in (found["parts"][0], weights)
    ]
    assert shapes[0] == shapes[1]
    shard = sorted(out.glob("*.safetensors"))[0]
    assert inspected(tool, shard)["parts"][0]["tensors"]
    shard.unlink()
    found = inspected(tool, out)
    assert found["whole"] is False
    assert shard.name in found["reason"]


def test_damaged_safetensors_file_is_named(tool, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      12")
    result = tool("inspect", tmp_path / "x.safetensors")
    assert result.returncode == 2
    assert "x.safetensors" in result.stderr
    assert result.stderr.count("\n") == 1


def test_export_of_another_maker_is_compared_with_its_index(sharded, tool, tmp_path):
    out = tmp_path / "out"
    assert tool("to-safetensors", sharded.run, out, "--max-shard-size", "1KB").returncode == 0
    (out / "export.json").unlink()
    assert inspected(tool, out)["whole"] is True
    sorted(out.glob("*.safetensors"))[0].unlink()
    found = inspected(tool, out)
    assert found["whole"] is False
    assert "are missing" in found["reason"]


def test_depth_cuts_the_tree(sharded, tool):
    full = tool("inspect", sharded.iteration / "model").stdout
    short = tool("inspect", sharded.iteration / "model", "--depth", "1").stdout
    assert "[5, 7] float32, 140 B, 2 chunks" in full
    assert "[5, 7]" not in short
    assert "blocks  480 in 24 tensors, 1.92 kB" in short


def test_terminal_gets_a_tree(sharded, capsys):
    console = Console(force_terminal=True, width=100, no_color=True)
    show(inspect_path(sharded.run), None, console)
    shown = capsys.readouterr().out
    assert "├── " in shown
    assert "[5, 7] float32, 140 B, 2 chunks" in shown
    assert "iter_000000100" in shown


def test_names_with_markup_are_shown_as_they_are(tmp_path, capsys):
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"[bold]x": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    show(inspect_path(tmp_path / "dcp"), None, Console(force_terminal=True, width=100))
    show(inspect_path(tmp_path / "dcp"), None, Console(force_terminal=False, width=100))
    assert capsys.readouterr().out.count("[bold]x") == 4


def test_inspect_does_not_import_torch(sharded, tool):
    code = (
        "import sys; from pathlib import Path; from dcp_convert.inspection import inspect_path; "
        "inspect_path(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", code, sharded.run], check=True, timeout=60)
