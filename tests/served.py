"""A real `tandem serve` for tests: started as a user starts it, watched from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

START_WITHIN_S = 120.0
STOP_WITHIN_S = 5.0


class Served:
    """A running `tandem serve`. `lines` is what it has printed so far."""

    def __init__(self, arguments: tuple[str, ...], runtime: Path) -> None:
        self.runtime = runtime
        self.lines: list[str] = []
        self._announced = threading.Event()
        self.url = ""
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "launcher", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line.rstrip())
            if match := re.match(r"Tandem serves .* on (http://\S+)", line):
                self.url = match[1]
                self._announced.set()
        self._announced.set()

    @property
    def output(self) -> str:
        """Everything printed."""
        return "\n".join(self.lines)

    def wait_until_announced(self) -> None:
        """Returns when it has said that it serves; fails with its output when it does not."""
        assert self._announced.wait(START_WITHIN_S), self.output
        assert self.url, self.output

    def wait_for_exit(self, within_s: float = START_WITHIN_S) -> int:
        """Its exit code."""
        code = self.popen.wait(within_s)
        self._reader.join(5)
        return code

    def children(self) -> dict[str, psutil.Process]:
        """The processes it has started, by the name that they were given."""
        found = {}
        for process in psutil.Process(self.popen.pid).children():
            if not is_alive(process):
                continue
            line = process.cmdline()
            found[line[line.index("--name") + 1] if "--name" in line else "gateway"] = process
        return found

    def stop(self, signum: int = signal.SIGINT) -> float:
        """Interrupt it; returns the seconds that it took to end."""
        started = time.monotonic()
        self.popen.send_signal(signum)
        self.popen.wait(20)
        return time.monotonic() - started

    def leftovers(self) -> list[str]:
        """Files in its runtime directory: there must be none when it has ended."""
        return [str(path) for path in self.runtime.rglob("run-*/*")]


def wait_for(condition: Callable[[], bool], within_s: float, what: str) -> None:
    """Poll, since processes do not tell when they are gone."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs (a zombie does not)."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@contextmanager
def served(runtime: Path, *arguments: str) -> Iterator[Served]:
    """Start `tandem serve` on a free port, wait until it serves, and end it."""
    process = Served((*arguments, "--port", "0"), runtime)
    try:
        process.wait_until_announced()
        yield process
    finally:
        _end(process)


def _end(process: Served) -> None:
    """Whatever the test did to it. What the launcher started follows it, also when it has to be killed."""
    if process.popen.poll() is None:
        process.popen.send_signal(signal.SIGINT)
        try:
            process.popen.wait(20)
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()


def refused(runtime: Path, *arguments: str) -> tuple[int, str]:
    """Run `tandem` with arguments that it must refuse; returns exit code and output."""
    result = subprocess.run(
        [sys.executable, "-m", "launcher", *arguments],
        capture_output=True,
        text=True,
        timeout=START_WITHIN_S,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        check=False,
    )
    return result.returncode, result.stdout + result.stderr
