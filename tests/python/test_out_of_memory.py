"""Every allocation that Python makes for the extension fails in turn: MemoryError, and the next call works.

The library's own allocations are made to fail in tests/c/test_out_of_memory.c.
"""

import ctypes

import pytest
from deepwell import _deepwell

testcapi = pytest.importorskip("_testcapi", reason="this Python comes without its own tests")

GRAPH = """{"format": "deepwell.graph", "version": 1, "symbols": ["B"], "leaves": [
 {"name": "x", "role": "input", "dtype": "f32", "shape": ["B", 3]},
 {"name": "w", "role": "parameter", "dtype": "f32", "shape": [5, 3]}],
 "nodes": [{"op": "linear", "inputs": ["x", "w"], "outputs": ["y"], "attrs": {}}], "outputs": ["y"]}"""


def make_calls():
    graph = _deepwell.Graph(GRAPH)
    engine = _deepwell.Engine(graph, (0,), (1,))
    plan = engine.plan((2,))
    arena = _deepwell.Arena(plan.arena_bytes)
    tensors = [(ctypes.c_float * count)() for count in (2 * 3, 5 * 3, 2 * 5, 2 * 5, 5 * 3)]
    x, w, y, dy, dw = (ctypes.addressof(tensor) for tensor in tensors)
    return {
        "Graph": lambda: _deepwell.Graph(GRAPH),
        "text": graph.text,
        "json": graph.json,
        "cost": lambda: graph.cost((2,)),
        "leaves": lambda: graph.leaves,
        "Engine": lambda: _deepwell.Engine(graph, (0,), (1,)),
        "plan": lambda: engine.plan((2,)),
        "backward_leaves": lambda: engine.backward_leaves,
        "outputs": lambda: plan.outputs,
        "grad_parts": lambda: plan.grad_parts,
        "output_parts": lambda: plan.output_parts,
        "describe": plan.describe,
        "Arena": lambda: _deepwell.Arena(4096),
        "forward": lambda: plan.forward((arena.address,), (x, w), (y,)),
        "backward": lambda: plan.backward(-1, (arena.address,), (x, w), (y,), (dy,), (dw,)),
        "machine": _deepwell.machine,
        "refusal": lambda: refused(_deepwell.Graph, "{}"),
    }, tensors


def refused(function, *arguments):
    try:
        function(*arguments)
    except _deepwell.Error:
        return
    pytest.fail("not refused")


NAMES = list(make_calls()[0])


@pytest.mark.parametrize("name", NAMES)
def test_every_allocation_of_python_may_fail(name):
    enough, least, in_a_row = 400, 20, 3
    calls, tensors = make_calls()
    call = calls[name]
    call()
    quiet = 0
    for position in range(enough):
        error = None
        testcapi.set_nomemory(position, position + 1)
        try:
            call()
        except MemoryError:
            error = MemoryError
        finally:
            testcapi.remove_mem_hooks()
        quiet = 0 if error else quiet + 1
        # If Python itself tolerates a failed allocation (a free list, a cache), nothing is raised.
        if quiet >= in_a_row and position >= least:
            break
    assert quiet >= in_a_row
    call()
    del tensors
