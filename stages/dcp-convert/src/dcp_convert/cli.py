"""The command line of dcp-convert."""

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flywheel_shared.errors import UserError, run_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Convert and inspect distributed checkpoints (DCP) in little memory.",
)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Weights(StrEnum):
    """Which weights of a checkpoint."""

    AUTO = "auto"
    MODEL = "model"
    EMA = "ema"


class Dtype(StrEnum):
    """What floating-point tensors become."""

    KEEP = "keep"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@app.command("to-safetensors")
def to_safetensors(
    source: Annotated[Path, typer.Argument(help="A run, one of its iter_* folders, or a DCP folder.")],
    output: Annotated[Path, typer.Argument(help="The folder to write; appears when it is complete.")],
    weights: Annotated[
        Weights, typer.Option(help="auto takes ema where the checkpoint has it.")
    ] = Weights.AUTO,
    dtype: Annotated[Dtype, typer.Option(help="Cast float tensors; others stay as they are.")] = Dtype.KEEP,
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of values in a file, e.g. 5GB.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that exists.")] = False,
) -> None:
    """Write a checkpoint's weights as safetensors, with its assets and an export.json saying where from."""
    from dcp_convert.export import to_safetensors as convert
    from dcp_convert.progress import size

    done = convert(source, output, weights, dtype, parse_size(max_shard_size), overwrite, _warn)
    shards = sum(name.endswith(".safetensors") and "/" not in name for name in done.files)
    where = done.source.iteration or done.source.dcp
    print(
        f"{done.output}: {done.tensors} tensors, {done.parameters:,} parameters, {size(done.values)} "
        f"in {shards} file{'s' if shards != 1 else ''}, {done.source.weights or 'weights'} of {where}"
    )


@app.command("inspect")
def inspect(
    path: Annotated[Path, typer.Argument(help="A run, iter_* folder, DCP folder or safetensors export.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    depth: Annotated[int | None, typer.Option(min=0, help="Levels of names to show; all by default.")] = None,
) -> None:
    """Show tensors, sizes, sharding, parameter counts and whether a checkpoint is whole."""
    from dcp_convert.inspection import inspect_path

    found = inspect_path(path)
    if as_json:
        print(found.to_json())
        return
    from rich.console import Console

    from dcp_convert.tree import show

    show(found, depth, Console())


def parse_size(text: str) -> int:
    """Bytes of "5GB", "500 MiB" or "1000000"; raises UserError for anything else or for nothing."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    count = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if count < 1:
        raise UserError(f"--max-shard-size: found {text!r}, expected a size such as 5GB, 500MB or 2GiB")
    return count


def _warn(message: str) -> None:
    print(f"dcp-convert: warning: {message}", file=sys.stderr, flush=True)


def main() -> None:
    """Console script."""
    run_app(app, "dcp-convert")
