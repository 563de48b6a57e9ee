"""Print an inspection: rich trees on a terminal, indented plain lines elsewhere."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from dcp_convert.inspection import Inspection, Part, TensorInfo
from dcp_convert.progress import size


@dataclass
class Node:
    """A module or a tensor: the sums over everything below it."""

    name: str
    elements: int = 0
    bytes: int = 0
    tensors: int = 0
    tensor: TensorInfo | None = None
    children: dict[str, "Node"] = field(default_factory=dict)


def show(found: Inspection, depth: int | None, console: Console) -> None:
    """Print to `console`; trees end at `depth` levels of names, None shows every tensor."""
    plain = not console.is_terminal
    for line in _heading(found):
        console.print(line, style=None if plain else "bold", markup=False, highlight=False, soft_wrap=True)
    if found.checkpoints:
        _checkpoints(found, console, plain)
    for part in found.parts:
        root = module_tree(part)
        if plain:
            for line in _lines(root, depth):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(_branch(Tree(escape(_label(root)), guide_style="dim"), root, depth))
        for line in _totals(part):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for name, count in found.files.items():
        console.print(f"file {name}  {size(count)}", markup=False, highlight=False, soft_wrap=True)


def module_tree(part: Part) -> Node:
    """The tensors of a part by the components of their names."""
    root = Node(part.name)
    for tensor in part.tensors:
        node = root
        _count(node, tensor)
        for component in tensor.name.split("."):
            node = node.children.setdefault(component, Node(component))
            _count(node, tensor)
        node.tensor = tensor
    return root


def _count(node: Node, tensor: TensorInfo) -> None:
    node.elements += math.prod(tensor.shape)
    node.bytes += tensor.bytes
    node.tensors += 1


def _heading(found: Inspection) -> Iterator[str]:
    state = {True: "whole", False: "NOT whole", None: "unverifiable"}[found.whole]
    step = f", step {found.step}" if found.step is not None else ""
    reason = f": {found.reason}" if found.reason else ""
    yield f"{found.path}  ({found.kind}{step}) {state}{reason}"
    for warning in found.warnings:
        yield f"warning: {warning}"


def _checkpoints(found: Inspection, console: Console, plain: bool) -> None:
    rows = [
        (
            row.name,
            size(row.bytes),
            "latest" if row.latest else "",
            "whole" if row.whole else f"NOT whole: {row.reason}",
        )
        for row in found.checkpoints
    ]
    if plain:
        for cells in rows:
            console.print(
                "  ".join(cell for cell in cells if cell), markup=False, highlight=False, soft_wrap=True
            )
        return
    table = Table("checkpoint", "size", "", "state")
    for cells in rows:
        table.add_row(*map(escape, cells))
    console.print(table)


def _totals(part: Part) -> Iterator[str]:
    what = "elements" if part.name == "optim" else "parameters"
    yield f"  {what}: {count_of(part.elements)} in {_tensors(len(part.tensors))}, {size(part.bytes)}"
    width = max(map(len, part.elements_by_module), default=0)
    for module, count in part.elements_by_module.items():
        yield f"    {module:{width}}  {count:,}"
    if part.objects:
        some = ", ".join(sorted(part.objects)[:5]) + (", ..." if len(part.objects) > 5 else "")
        yield f"  not tensors: {len(part.objects)} entries, {size(sum(part.objects.values()))}: {some}"


def count_of(elements: int) -> str:
    """A count in full and, from a million on, in short: "1,234,567 (1.23 M)"."""
    if elements < 1e6:
        return f"{elements:,}"
    short = f"{elements / 1e9:.2f} B" if elements >= 1e9 else f"{elements / 1e6:.2f} M"
    return f"{elements:,} ({short})"


def _label(node: Node) -> str:
    if node.tensor is not None and not node.children:
        tensor = node.tensor
        chunks = f", {tensor.chunks} chunks" if tensor.chunks > 1 else ""
        return f"{node.name}  {list(tensor.shape)} {tensor.dtype}, {size(tensor.bytes)}{chunks}"
    return f"{node.name}  {node.elements:,} in {_tensors(node.tensors)}, {size(node.bytes)}"


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _branch(tree: Tree, node: Node, depth: int | None) -> Tree:
    if depth != 0:
        for child in node.children.values():
            _branch(tree.add(escape(_label(child))), child, None if depth is None else depth - 1)
    return tree


def _lines(node: Node, depth: int | None, indent: str = "") -> Iterator[str]:
    yield indent + _label(node)
    if depth != 0:
        for child in node.children.values():
            yield from _lines(child, None if depth is None else depth - 1, indent + "  ")
