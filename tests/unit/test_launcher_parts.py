"""The launcher's parts: amounts of memory, run directories, the lifeline, defaults."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from launcher.errors import LaunchError
from launcher.options import Bytes
from launcher.processes import ProcessSpec, Supervisor
from launcher.run_directory import RunDirectory


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1024", 1024), ("2GiB", 2 << 30), ("512MB", 512 * 10**6), ("1.5g", 1_500_000_000), ("3 kib", 3072), ("7b", 7)],
)
def test_amounts_of_memory(text: str, nbytes: int) -> None:
    assert Bytes().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "lots", "-3", "1TiBs", "GiB", "1e9"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no amount of memory"):
        Bytes().convert(text, None, None)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short: pytest's own are too long for sockets when it runs in several processes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory)


def test_a_run_directory_is_private_and_goes(runtime: Path) -> None:
    with RunDirectory() as run:
        assert run.path.stat().st_mode & 0o777 == 0o700
        assert run.path.parent.stat().st_mode & 0o777 == 0o700
        (run.path / "socket").write_text("")
        assert run.socket("gateway") == f"ipc://{run.path}/gateway"
    assert not run.path.exists()


def test_a_living_launcher_keeps_its_directory_and_a_dead_one_does_not(runtime: Path) -> None:
    with RunDirectory() as living:
        stale = living.path.parent / "run-stale"
        stale.mkdir()
        (stale / "lock").write_text("")
        (stale / "gateway").write_text("")
        with RunDirectory():
            assert living.path.exists()
            assert not stale.exists()


def test_a_directory_of_others_is_refused(runtime: Path) -> None:
    (runtime / f"tandem-{os.getuid()}").symlink_to(runtime)
    with pytest.raises(LaunchError, match="only you can enter"):
        RunDirectory()


def test_a_path_too_long_for_sockets_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with RunDirectory() as run:
        assert deep not in run.path.parents
        assert len(run.socket("decode-255.peers")) <= len("ipc://") + 107
    assert not list(deep.iterdir())


def test_a_child_follows_its_launcher(tmp_path: Path) -> None:
    """When the other end of the lifeline closes, SIGTERM comes first."""
    reader, writer = os.pipe()
    script = (
        "import signal, sys, time\n"
        "from launcher.lifeline import Ready, follow\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        f"follow({reader})\n"
        "Ready(1).report('here')\n"
        # The signal may reach any thread; the main one, which runs the handler, must not sleep for good.
        "while True: time.sleep(0.05)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], pass_fds=(reader,), stdout=subprocess.PIPE)
    os.close(reader)
    assert child.stdout is not None
    assert child.stdout.readline() == b"here\n"
    os.close(writer)
    assert child.wait(20) == 7


def test_a_first_start_that_fails_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=r"ended before it was ready \(exit code 2\)"):
        Supervisor([ProcessSpec("wrong", ("no-such-command",))], lambda _name, _incarnation: None).run(
            lambda _lines: pytest.fail("nothing became ready")
        )
    assert "No such command" in capfd.readouterr().err
