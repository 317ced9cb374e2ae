"""Names that the sources of a layer may not contain (docs/design.md)."""

import re
from pathlib import Path

_SOURCES = Path(__file__).parents[2] / "src"


def _found(folder: str, pattern: str) -> list[str]:
    paths = sorted((_SOURCES / folder).rglob("*.[ch]"))
    assert paths
    found = []
    for path in paths:
        found += [f"{path.name}: {text}" for text in re.findall(pattern, path.read_text())]
    return found


def test_the_engine_names_no_operation_and_no_kernel() -> None:
    """The operation table and the entries of kernels describe everything that the engine has to
    know."""
    assert _found("engine", r"\bDW_OP_\w+") == []
    contracts = "kernel|gpu_kernel|sized_graph|reference/interpret"
    assert _found("engine", rf'#include "kernel/(?!(?:{contracts})\.h").*') == []
    assert _found("engine", r"\bdw__(?:matmul|fused|attention|kernels_cpu)_\w+") == []
