from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from launcher.plan import as_json, render
from pools.plan import MemoryPlan
from pools.sizing import Phase, SizingRequest, plan_memory
from tests.pool_specs import HYBRID


def make_plan() -> MemoryPlan:
    request = SizingRequest(
        phase=Phase.DECODE,
        spec=HYBRID,
        max_context_tokens=64,
        memory_bytes=2_000_000_000,
        weights_bytes=1_234_567_890,
        mamba_size=100,
    )
    return plan_memory(request)


def test_everything_in_the_plan_is_shown() -> None:
    plan = make_plan()
    out = io.StringIO()
    render(plan, Console(file=out, width=200))
    shown = out.getvalue()
    for tensor in plan.tensors:
        assert tensor.name in shown
        assert " × ".join(map(str, tensor.shape)) in shown
        assert f"{tensor.nbytes:,}" in shown
    for text in ("decode worker", "1,234,567,890", "2,000,000,000", f"{plan.total_bytes:,}", *plan.limits):
        assert text in shown
    (warning,) = plan.warnings
    assert f"warning: {warning}" in shown


def test_narrow_terminal_keeps_the_numbers() -> None:
    plan = make_plan()
    out = io.StringIO()
    render(plan, Console(file=out, width=80))
    assert f"{plan.total_bytes:,}" in out.getvalue()


def test_json_is_the_plan() -> None:
    plan = make_plan()
    assert json.loads(as_json(plan)) == plan.to_dict()


def test_planning_needs_neither_torch_nor_transformers() -> None:
    code = "import launcher.plan, pools.sizing, sys; print({'torch', 'transformers'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
