"""docs/tutorial.md: all of its blocks, in order."""

import json

from page_blocks import run_page
from test_program import ROOT


def test_the_tutorial(tmp_path, monkeypatch, capsys, always):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    printed = run_page(ROOT / "docs/tutorial.md", tmp_path, names)
    assert names["after"] < names["before"] - 0.5 and 5.5 < names["before"] < 7
    assert names["trainer"].step == 40
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "lr" in line] == list(range(1, 31))
    assert names["prediction"]["fits"]
    assert names["hw"].gpus or names["prediction"]["step_time_ms"] is None
    assert names["result"].verdict in ("within", "apart")
    assert (tmp_path / "run/step-000000000045/manifest.json").exists()
    told = capsys.readouterr().out
    assert "held-out loss" in told and "continued to step 40" in told
    assert len(printed) == 5 and printed[-1].strip()
    for file in ("trace.json", "report.html", "parity.html", "small.engine"):
        assert (tmp_path / file).stat().st_size > 0
