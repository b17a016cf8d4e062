"""Show a memory plan: as tables for people, as JSON for programs. Needs no model library and no torch."""

from __future__ import annotations

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pools.plan import MemoryPlan
from pools.sizing import readable


def render(plan: MemoryPlan, console: Console) -> None:
    """Print the tensors, the budget, what bounds concurrency, and the warnings."""
    console.print(_tensors(plan))
    console.print(_budget(plan))
    for limit in plan.limits:
        console.print(f"· {escape(limit)}")
    for warning in plan.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}")


def as_json(plan: MemoryPlan) -> str:
    """The plan as an indented JSON object."""
    return json.dumps(plan.to_dict(), indent=2)


def _tensors(plan: MemoryPlan) -> Table:
    table = Table(title=f"State of a {plan.request.phase.value} worker", title_justify="left")
    table.add_column("tensor", no_wrap=True)
    table.add_column("shape")
    table.add_column("dtype", no_wrap=True)
    _add_size_columns(table)
    for tensor in plan.tensors:
        shape = " × ".join(map(str, tensor.shape))
        table.add_row(escape(tensor.name), shape, tensor.dtype.value, *_size(tensor.nbytes))
    return table


def _budget(plan: MemoryPlan) -> Table:
    table = Table(title="Memory", title_justify="left")
    table.add_column("use")
    _add_size_columns(table)
    table.add_row("weights", *_size(plan.request.weights_bytes))
    table.add_row("reserve (activations)", *_size(plan.request.reserve_bytes))
    pages = plan.num_pages * plan.layout.page.nbytes
    table.add_row(f"{plan.num_pages} pages", *_size(pages))
    table.add_row(f"{plan.num_slots} slots", *_size(plan.block_bytes - pages))
    table.add_row(f"tables of {plan.num_rows} rows", *_size(plan.table_bytes), end_section=True)
    table.add_row("total", *_size(plan.total_bytes), style="bold")
    table.add_row("budget", *_size(plan.request.memory_bytes))
    table.add_row("left over", *_size(plan.request.memory_bytes - plan.total_bytes))
    return table


def _add_size_columns(table: Table) -> None:
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)


def _size(nbytes: int) -> tuple[str, str]:
    return readable(nbytes), f"{nbytes:,}"
