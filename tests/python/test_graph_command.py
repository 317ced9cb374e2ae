"""`deepwell graph`: a graph from a file as text, with its cost and its plan."""

import pytest
from test_program import run

GRAPH = """deepwell graph 1
symbols B

input %x: f32[B, 3]
parameter %w: f32[5, 3]

%y: f32[B, 5] = linear(%x, %w)

return %y
"""


@pytest.fixture
def graph(tmp_path):
    path = tmp_path / "graph.txt"
    path.write_text(GRAPH)
    return str(path)


def test_prints_what_it_read(graph, tmp_path):
    first = run("graph", graph)
    assert first.returncode == 0, first.stderr
    assert "linear" in first.stdout
    again = tmp_path / "again.txt"
    again.write_text(first.stdout)
    assert run("graph", str(again)).stdout == first.stdout


def test_cost_counts_a_multiply_add_as_two(graph):
    result = run("graph", graph, "--sizes", "B=7")
    assert result.returncode == 0, result.stderr
    assert f"cost: {2 * 7 * 5 * 3} floating-point operations" in result.stdout


def test_plan_of_a_gradient(graph):
    result = run("graph", graph, "--plan", "B=7", "--grad", "0")
    assert result.returncode == 0, result.stderr
    assert "plan B=7: 2 instructions, 1 of them forward" in result.stdout
    assert "f32[5,3]@grad:0" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ([], 2),
        (["--sizes", "C=1"], 2),
        (["--sizes", "B=-1"], 2),
        (["--plan"], 2),
        (["--grad", "first"], 2),
        (["--grad", "9"], 1),
    ],
)
def test_wrong_usage(graph, arguments, status):
    result = run("graph", *([graph] if arguments else []), *arguments)
    assert result.returncode == status
    assert result.stderr


def test_malformed_and_missing_files(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"deepwell": ')
    for path in (broken, tmp_path / "missing"):
        result = run("graph", str(path))
        assert result.returncode == 1
        assert path.name in result.stderr
