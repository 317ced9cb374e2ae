"""docs/support.md agrees with the tests."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[2]


def test_page_agrees_with_the_tests() -> None:
    spec = importlib.util.spec_from_file_location("support_page", ROOT / "scripts" / "support.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    lines = script.behaviours(ROOT)
    assert len(lines) > 60 and len({line[:2] for line in lines}) == len(lines)
    written = (ROOT / "docs" / "support.md").read_text()
    assert written == script.page(lines), "run .venv/bin/python scripts/support.py"
