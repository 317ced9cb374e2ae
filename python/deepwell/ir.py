"""deepwell.capture: a model's graph, to inspect and to pass on."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Mapping, Sequence

import torch

from deepwell import _deepwell
from deepwell.capture import Captured, capture_graph
from deepwell.errors import CaptureError


class IR:
    """A captured model. ``print(ir)`` lists its layers and the shapes of their parameters.

    Attributes:
        symbols: names of the sizes that may vary, in order ("B", "S").
        parameters: {name: shape}, tied parameters once.
        parameter_count: total number of elements of the parameters.
        node_count: operations in the graph.
    """

    def __init__(self, name: str, captured: Captured) -> None:
        self.name = name
        self.captured = captured
        self._graph = _deepwell.Graph(captured.json)
        self._recognized: Any = None  # the graph with composite operations, made on first use
        self._parsed = json.loads(captured.json)
        self.symbols: list[str] = self._parsed["symbols"]
        shapes = {leaf["name"]: tuple(leaf["shape"]) for leaf in self._parsed["leaves"]}
        self.parameters: dict[str, tuple[Any, ...]] = {
            leaf.target: shapes[leaf.name] for leaf in captured.leaves if leaf.kind == "parameter"
        }
        self.parameter_count = sum(_count(shape) for shape in self.parameters.values())
        self.node_count: int = self._graph.node_count

    def text(self) -> str:
        """Returns the whole graph as text, one line per node."""
        return self._graph.text()

    def json(self) -> str:
        """Returns the graph as JSON, which the program ``deepwell graph`` reads."""
        return self._graph.json()

    def cost(self, **sizes: int) -> tuple[float, float]:
        """Returns (FLOPs, least bytes moved) of one forward: ``ir.cost(B=8, S=256)``."""
        missing = [name for name in self.symbols if name not in sizes]
        if missing or len(sizes) != len(self.symbols):
            raise ValueError(f"cost needs exactly the sizes {', '.join(self.symbols)}")
        if (
            self._recognized is None
        ):  # as the engine sees it: experts are grouped matmuls without gathers
            self._recognized = _deepwell.Graph(self.captured.json)
            for graph_pass in ("common", "fold", "recognize"):
                self._recognized.run_pass(graph_pass)
        return self._recognized.cost([sizes[name] for name in self.symbols])

    def __str__(self) -> str:
        groups: dict[tuple[int, str], Counter[str]] = {}
        for node in self._parsed["nodes"]:
            key = (node.get("layer", -1), node.get("region", "none"))
            groups.setdefault(key, Counter())[node["op"]] += 1
        layers = {layer for layer, _ in groups if layer >= 0}
        lines = [
            f"{self.name}: {len(layers)} layers, {len(self.parameters)} parameters "
            f"({self.parameter_count / 1e6:.2f} M), {self.node_count} nodes, symbols {', '.join(self.symbols)}"
        ]
        for (layer, region), operations in groups.items():
            what = ", ".join(
                f"{op} x{count}" if count > 1 else op for op, count in sorted(operations.items())
            )
            lines.append(f"  {f'layer {layer}' if layer >= 0 else 'model':10}{region:9}{what}")
        lines.append("parameters:")
        lines += [f"  {name}: {list(shape)}" for name, shape in self.parameters.items()]
        return "\n".join(lines)

    __repr__ = __str__


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for dim in shape:
        product *= dim
    return product


def call_arguments(
    model: torch.nn.Module, example_inputs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments of a call of ``model``, from the user's example."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if example_inputs is None:
        if not hasattr(model, "config") or getattr(model, "main_input_name", "") != "input_ids":
            raise CaptureError(
                f"{type(model).__name__} does not declare its inputs: pass example_inputs, a tuple of "
                "positional or a dict of keyword arguments"
            )
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        kwargs = {"input_ids": torch.zeros(2, 8, dtype=torch.long, device=device)}
    elif isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
    elif isinstance(example_inputs, torch.Tensor):
        args = (example_inputs,)
    elif isinstance(example_inputs, Sequence):
        args = tuple(example_inputs)
        if len(args) == 2 and isinstance(args[0], tuple) and isinstance(args[1], dict):
            args, kwargs = args[0], dict(args[1])
    else:
        raise TypeError(
            f"example_inputs is a {type(example_inputs).__name__}; expected a tensor, a tuple, a dict, or a pair of a tuple "
            "and a dict"
        )
    return args, kwargs


def capture(model: torch.nn.Module, example_inputs: Any = None) -> IR:
    """Returns the graph of ``model``'s forward.

    Args:
        model: may be on the meta device, since nothing is computed.
        example_inputs: a tuple of positional arguments, a mapping of keyword arguments, or a pair of both. Only dtypes
            and ranks matter (sizes above 1 become symbols). None: token ids, for a Hugging Face model.

    Raises:
        CaptureError: names the operation and the module that could not be captured, and what to do.
    """
    args, kwargs = call_arguments(model, example_inputs)
    without_weights = all(p.is_meta for p in model.parameters())
    return IR(type(model).__name__, capture_graph(model, args, kwargs, repeat=without_weights))
