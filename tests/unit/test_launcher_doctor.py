from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from launcher import doctor
from launcher.cli import main
from transfer.errors import MediumUnusable
from transfer.media import MEDIA


def report() -> dict[str, dict[str, object]]:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    return {item["medium"]: item for item in json.loads(result.output[result.output.index("{") :])["transfer"]}


def test_every_back_end_is_tried() -> None:
    found = report()
    assert list(found) == list(MEDIA)
    for medium in ("shm", "tcp", "collective"):
        assert found[medium]["problem"] is None
        assert float(str(found[medium]["gigabytes_per_second"])) > 0


def test_what_does_not_work_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MediumUnusable("no room at the inn")

    monkeypatch.setattr(doctor, "unusable", lambda medium: "not installed" if medium == "nixl" else None)
    monkeypatch.setattr(doctor, "open_channel", broken)
    found = report()
    assert found["nixl"]["problem"] == "not installed"
    assert found["tcp"]["problem"] == "a trial failed: no room at the inn"
    result = CliRunner().invoke(main, ["doctor"])
    assert "no room at the inn" in result.output
