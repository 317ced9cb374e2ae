"""Writes docs/support.md from the tests of users' behaviours.

    .venv/bin/python scripts/support.py

Each test marked ``support(area, behaviour, served, because)`` in tests/python/test_users_*.py, and each such case of
distributed_cases.py, is a line; the test itself compares its mark with what happens (tests/python/users.py).
"""

import ast
import pathlib

HEAD = """\
# What users do with an optimized model

Look up here what happens to your code after `deepwell.optimize`: hooks, checkpointing, copies, compilers, trainers,
precision. For your own model, `deepwell.summary(model)` reports what ran where, and why:

    model = deepwell.optimize(model)
    model(**batch)
    print(deepwell.summary(model))

Every line below is a test (`tests/python/test_users_*.py`, `distributed_cases.py`), for models in the engine on the CPU
and on an emulated Hopper GPU; `tests/gpu/test_support.py` repeats what a device may change on a GPU. A test compares
values and gradients with plain PyTorch, and checks in the summary what served the model:

- engine: Deepwell ran the model.
- PyTorch: the module's own forward ran; the summary counts the call and gives the reason.
- engine and PyTorch: PyTorch ran the part that the reason names, the engine ran the rest.
- refused: an error says what to do.

On a GPU, PyTorch runs the whole of a model whose forward cannot be captured, with Deepwell's attention; on the CPU the
modules inside are tried.

`copy.copy(model)` is not supported, because the copy would share the original's forward: use `copy.deepcopy`.
`nn.DataParallel` makes such copies: use `DistributedDataParallel`.

`scripts/support.py` writes this page.
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
    tests = root / "tests" / "python"
    for path in (*sorted(tests.glob("test_users_*.py")), tests / "distributed_cases.py"):
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
        "\n## GPU kernels\n\n`deepwell explain kernels` prints this table.\n\n"
        "| kernel | computes | for | elements | proof | when it is used |\n"
        "|---|---|---|---|---|---|\n"
    )
    columns = ("name", "operation", "architectures", "elements", "proof", "use")
    for kernel in linear.kernels():
        text += "| " + " | ".join(kernel[column] for column in columns) + " |\n"
    return text


if __name__ == "__main__":
    root = pathlib.Path(__file__).parents[1]
    (root / "docs" / "support.md").write_text(page(behaviours(root)))
