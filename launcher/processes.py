"""Starts the processes of one `tandem serve`, waits until they are ready, watches them, and ends them all.

STARTING ──ready line──▶ UP ──exit──▶ (back-off) ──▶ STARTING
    └──── exit or time-out before it was ever up ──▶ everything ends, exit code 1
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from launcher.errors import AlreadySaid, LaunchError
from launcher.lifeline import LOADING
from launcher.progress import Bars
from launcher.settings import new_incarnation

_STOP_WITHIN_S = 4.0
_READY_WITHIN_S = 600.0
_WATCH_EVERY_S = 0.25
_LONGEST_BACK_OFF_S = 30.0
_CALM_AFTER_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: its name, and the arguments of the `tandem` command that it runs. Workers have incarnations."""

    name: str
    arguments: tuple[str, ...]
    worker: bool = False


class _Process:
    """One running process and its pipes."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        lifeline_reader, self._lifeline = os.pipe()
        self.ready, ready_writer = os.pipe()
        self.ready_line: str | None = None
        self.percent = 0
        self._unread = ""
        self.started_at = time.monotonic()
        self.incarnation = new_incarnation()
        more = ["--lifeline-fd", str(lifeline_reader), "--ready-fd", str(ready_writer)]
        if spec.worker:
            more += ["--incarnation", self.incarnation]
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "launcher", *spec.arguments, *more],
                pass_fds=(lifeline_reader, ready_writer),
                stdin=subprocess.DEVNULL,
                # Ctrl-C reaches the launcher alone, which ends the others in order.
                start_new_session=True,
            )
        finally:
            os.close(lifeline_reader)
            os.close(ready_writer)

    def read_ready(self) -> bool:
        """Take what the process has said on its ready pipe, which is readable. True at its end or last line."""
        said = os.read(self.ready, 4096).decode()
        *lines, self._unread = (self._unread + said).split("\n")
        for line in lines:
            if line.startswith(LOADING):
                self.percent = int(line.removeprefix(LOADING))
            else:
                self.ready_line = line
        return not said or self.ready_line is not None

    def close(self) -> None:
        """Close the launcher's ends of the pipes."""
        os.close(self._lifeline)
        os.close(self.ready)


class Supervisor:
    """Runs a set of processes until it is told to stop, by a signal or by the first start that fails.

    `on_death` gets the name and incarnation of each worker that has ended by itself.
    """

    def __init__(self, specs: Sequence[ProcessSpec], on_death: Callable[[str, str], None]) -> None:
        self._specs = specs
        self._on_death = on_death
        self._processes: dict[str, _Process] = {}
        self._restart_at: dict[str, float] = {}
        self._back_off: dict[str, float] = {}
        self._stopping = False
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        self._stopping = True

    def run(self, on_ready: Callable[[dict[str, str]], None]) -> None:
        """Start all; call `on_ready` with each process's ready line, by name; watch until stopped; end all.

        Raises LaunchError when a process does not come up the first time.
        """
        try:
            for spec in self._specs:
                self._processes[spec.name] = _Process(spec)
            self._wait_until_ready()
            if not self._stopping:
                on_ready({name: process.ready_line or "" for name, process in self._processes.items()})
            while not self._stopping:
                time.sleep(_WATCH_EVERY_S)
                self._watch()
        finally:
            self._end_all()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_WITHIN_S
        with selectors.DefaultSelector() as selector, Bars() as bars:
            for started in self._processes.values():
                selector.register(started.ready, selectors.EVENT_READ, started)
            while selector.get_map() and not self._stopping:
                for key, _ in selector.select(_WATCH_EVERY_S):
                    process: _Process = key.data
                    ended = process.read_ready()
                    if process.percent:  # the gateway has nothing to load
                        bars.update(process.spec.name, process.percent)
                    if not ended:
                        continue
                    selector.unregister(process.ready)
                    if process.ready_line is None:
                        raise _failed_start(process)
                if time.monotonic() > deadline:
                    slow = ", ".join(key.data.spec.name for key in selector.get_map().values())
                    raise LaunchError(f"{slow} did not become ready within {_READY_WITHIN_S:g} s")

    def _watch(self) -> None:
        """Start again what has ended, a little later each time."""
        now = time.monotonic()
        for name, process in list(self._processes.items()):
            status = process.popen.poll()
            if status is None:
                continue
            calm = now - process.started_at > _CALM_AFTER_S
            wait_s = 1.0 if calm else min(2 * self._back_off.get(name, 0.5), _LONGEST_BACK_OFF_S)
            self._back_off[name] = wait_s
            self._restart_at[name] = now + wait_s
            log.error("%s ended (%s); starting it again in %g s", name, _how_it_ended(status), wait_s)
            process.close()
            del self._processes[name]
            if process.spec.worker:
                self._on_death(name, process.incarnation)
        for spec in self._specs:
            if self._restart_at.get(spec.name, now + 1) <= now:
                del self._restart_at[spec.name]
                self._processes[spec.name] = _Process(spec)

    def _end_all(self) -> None:
        """SIGTERM to all, SIGKILL to what is left after a few seconds."""
        for process in self._processes.values():
            if process.popen.poll() is None:
                process.popen.terminate()
        deadline = time.monotonic() + _STOP_WITHIN_S
        for process in self._processes.values():
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s did not leave in time; it is killed", process.spec.name)
                process.popen.kill()
                process.popen.wait()
            process.close()


def _failed_start(process: _Process) -> LaunchError:
    """Exit code 1 is that of an error which the process has put into one line; anything else was no plan of ours."""
    status = process.popen.wait(_STOP_WITHIN_S)
    if status == 1:
        return AlreadySaid(f"{process.spec.name} did not start")
    return LaunchError(f"{process.spec.name} ended before it was ready ({_how_it_ended(status)})")


def _how_it_ended(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
