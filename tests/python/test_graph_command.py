"""`deepwell graph`: a graph from a file as text, with its cost and its plan."""

import json
import os
import resource
import subprocess

import pytest
from test_program import find_program, run

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


def test_graph_is_printed_as_read(graph, tmp_path):
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


def test_precision(graph):
    result = run("graph", graph, "--precision", "mxfp8", "--grad", "0", "--plan", "B=33")
    assert result.returncode == 0, result.stderr
    # x and w for the result; x and the gradient along the batch for w's gradient
    assert result.stdout.count('scheme="mxfp8"') == 4
    assert result.stdout.count("cpu.quantize") == 4


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ([], 2),
        (["--sizes", "C=1"], 2),
        (["--sizes", "B=-1"], 2),
        (["--plan"], 2),
        (["--grad", "first"], 2),
        (["--grad", "9"], 1),
        (["--precision", "fp8-row"], 2),
        (["--precision", "nvfp4"], 1),  # the graph has no seed
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


def test_invalid_files_give_one_message(tmp_path):
    def refused(path, expected):
        result = run("graph", str(path))
        assert result.returncode == 1
        assert result.stderr.startswith("deepwell: ")
        assert result.stderr.count("\n") == 1
        assert expected in result.stderr

    def file(name, content):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    refused(tmp_path, "directory")
    refused(tmp_path / "absent", "No such file")
    refused("/proc/self/mem", "error")
    refused(file("empty", b""), "header")
    refused(file("zeros", b"deepwell graph 1\n\0\0"), "NUL byte")
    refused(file("escapes", b"\x1b[2J\x1b]0;title\x07"), "header")
    refused(
        file("latin", "deepwell graph 1\ninput %é: f32[2]\n".encode("latin-1")), "expected a name"
    )
    refused(file("deep", b'{"a":' + b"[" * 1000000), "within one another")
    unreadable = file("unreadable", GRAPH.encode())
    unreadable.chmod(0)
    if os.geteuid() != 0:  # root may read any file
        refused(unreadable, "Permission denied")


def test_an_endless_file_is_refused():
    """Runs within an address space that barely holds the file."""
    limit = 3 << 30
    result = subprocess.run(
        [find_program(), "graph", "/dev/zero"],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert result.returncode == 1
    assert "cannot read /dev/zero" in result.stderr


def test_plan_larger_than_memory_is_described(graph):
    """The plan is described, because nothing of it is allocated; a graph whose sizes overflow is rejected."""
    result = run("graph", graph, "--plan", "B=1000000000000")
    assert result.returncode == 0
    assert "f32[1000000000000,5]" in result.stdout
    result = run("graph", graph, "--plan", "B=1000000000000000000")
    assert result.returncode == 1
    assert "2^61 bytes" in result.stderr


def test_json_has_graph_cost_and_operations(graph, tmp_path):
    result = run("graph", graph, "--plan", "B=7", "--grad", "0", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert set(found) == {"graph", "cost", "operations"}
    assert {"forward", "backward"} >= {each["phase"] for each in found["operations"]}
    # The graph's JSON is a file that the command reads, with the same cost.
    (tmp_path / "again.json").write_text(json.dumps(found["graph"]))
    again = run("graph", str(tmp_path / "again.json"), "--sizes", "B=7", "--json")
    assert json.loads(again.stdout)["cost"] == found["cost"]
    assert set(json.loads(run("graph", graph, "--json").stdout)) == {"graph"}
