"""Rules of the house that no other tool checks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from wire.messages import Message
from wire.rank_messages import RankMessage

ROOT = Path(__file__).parents[2]
FOLDERS = ("pools", "wire", "transfer", "models", "ranks", "prefill", "decode", "colocated", "gateway", "launcher")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def test_the_sources_were_found() -> None:
    assert len(SOURCES) > 60


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_has_one_job_and_under_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 400


@pytest.mark.parametrize("kind", get_args(Message), ids=lambda kind: kind.__name__)
def test_every_message_has_its_handler(kind: type) -> None:
    handler = f"def on_{snake(kind.__name__)}("
    private = f"def _on_{snake(kind.__name__)}("
    places = [path for path in SOURCES if handler in path.read_text() or private in path.read_text()]
    assert places, f"nobody handles {kind.__name__}"


@pytest.mark.parametrize("kind", get_args(RankMessage), ids=lambda kind: kind.__name__)
def test_every_message_between_ranks_is_sent_and_taken(kind: type) -> None:
    """In one of the two files that speak, and in the other that listens."""
    for name in ("team.py", "follower.py"):
        text = (ROOT / "ranks" / name).read_text() + (ROOT / "ranks" / "followers.py").read_text()
        assert re.search(rf"\b{kind.__name__}\b", text), f"{name} does not know {kind.__name__}"


def test_tests_have_no_init_files() -> None:
    """One would shadow the packages of the same names."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_nothing_is_pickled() -> None:
    """No code may come in over a wire or a file."""
    for path in SOURCES:
        assert not re.search(r"\bimport pickle|\btorch\.load\(|multiprocessing", path.read_text()), path


def test_packages_are_listed() -> None:
    """A folder that is not in pyproject.toml is missing from what users install."""
    listed = set(
        re.findall(r'"([a-z.]+)"', (ROOT / "pyproject.toml").read_text().split("packages = [")[1].split("]")[0])
    )
    present = {".".join(path.relative_to(ROOT).parts) for folder in FOLDERS for path in _packages(ROOT / folder)}
    assert listed == present


def _packages(folder: Path) -> list[Path]:
    return [path.parent for path in folder.rglob("__init__.py")]
