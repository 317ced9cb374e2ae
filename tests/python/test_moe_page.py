"""docs/moe.md: all of its blocks, in order."""

from page_blocks import run_page
from test_program import ROOT


def test_the_cookbook(tmp_path, capsys, always):
    names: dict = {}
    run_page(ROOT / "docs/moe.md", tmp_path, names)
    printed = capsys.readouterr().out
    assert "'tokens': [" in printed and "% dropped" in printed and "'imbalance': " in printed
    assert "'planned': 1.25" in printed
    assert names["loss"].isfinite() and names["told"]["dropped"] > 0
