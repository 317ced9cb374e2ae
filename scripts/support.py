"""Writes docs/support.md from the tests of users' behaviours.

    .venv/bin/python scripts/support.py

Each test marked ``support(area, behaviour, served, because)`` in tests/python/test_users_*.py is a line;
the test itself holds the mark to what happens (tests/python/users.py).
"""

import ast
import pathlib

HEAD = """\
# What users do with an optimized model

Made by `scripts/support.py` from the tests; every line is a test (`tests/python/test_users_*.py`) that
compares values and gradients with plain PyTorch and reads from the report who served the model.

- engine: Deepwell ran it.
- PyTorch: the module's own forward ran; `deepwell.summary(model)` counts the call and gives the reason.
- engine and PyTorch: the part that the reason is about ran in PyTorch, the rest in the engine.
- refused: an error that says what to do.

`copy.copy(model)` is not supported: the copy would share the original's forward (`copy.deepcopy` does not).
"""


def _mark(decorator: ast.expr) -> tuple[str, ...] | None:
    if not (isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute)):
        return None
    if decorator.func.attr != "support":
        return None
    return tuple(ast.literal_eval(argument) for argument in decorator.args)


def behaviours(root: pathlib.Path) -> list[tuple[str, ...]]:
    """(area, behaviour, served, because) of each marked test, in the order of files and lines."""
    found = []
    for path in sorted((root / "tests" / "python").glob("test_users_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                marks = filter(None, map(_mark, node.decorator_list))
                found += [(*mark, "")[:4] for mark in marks]
    return found


def page(lines: list[tuple[str, ...]]) -> str:
    text = HEAD
    for area in dict.fromkeys(line[0] for line in lines):
        text += f"\n## {area}\n\n| behaviour | served by | reason given |\n|---|---|---|\n"
        for _, behaviour, served, because in (line for line in lines if line[0] == area):
            text += f"| {behaviour} | {served} | {because} |\n"
    return text + _kernels()


def _kernels() -> str:
    from deepwell import linear

    text = (
        "\n## GPU kernels\n\nAs `deepwell explain kernels` has them.\n\n"
        "| kernel | computes | for | elements | where it was shown to be right | when it is taken |\n"
        "|---|---|---|---|---|---|\n"
    )
    columns = ("name", "operation", "architectures", "elements", "proof", "use")
    for kernel in linear.kernels():
        text += "| " + " | ".join(kernel[column] for column in columns) + " |\n"
    return text


if __name__ == "__main__":
    root = pathlib.Path(__file__).parents[1]
    (root / "docs" / "support.md").write_text(page(behaviours(root)))
