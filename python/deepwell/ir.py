"""deepwell.capture: a model's graph, to inspect and to pass on."""

from __future__ import annotations

import inspect
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
        module: the module that was captured, and `arguments`, (args, kwargs) of the call. None if the graph came without.
    """

    def __init__(
        self,
        name: str,
        captured: Captured,
        module: torch.nn.Module | None = None,
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {}),
    ) -> None:
        self.name = name
        self.captured = captured
        self.module = module
        self.arguments = arguments
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


def _first_layer(model: torch.nn.Module) -> torch.nn.Module | None:
    """Returns the layer that reads the model's only required argument, if the order of the modules tells."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) != 1:
        return None
    known = (
        torch.nn.Embedding,
        torch.nn.Linear,
        torch.nn.LayerNorm,
        torch.nn.TransformerEncoderLayer,
    )
    return next((module for module in model.modules() if isinstance(module, known)), None)


def made_arguments(
    model: torch.nn.Module, batch: int = 2, seq_len: int = 8, labels: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns arguments of a call of ``model`` with zeros: token ids for a Hugging Face model (``labels``: also as
    labels, if it has a loss) and for a model whose first layer is an embedding; vectors for a model that begins with a
    linear layer or a norm. None: the model does not say what it reads."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ids = torch.zeros(batch, seq_len, dtype=torch.long, device=device)
    if hasattr(model, "config") and getattr(model, "main_input_name", "") == "input_ids":
        has_loss = labels and "labels" in inspect.signature(model.forward).parameters
        return (), {"input_ids": ids, "labels": ids} if has_loss else {"input_ids": ids}
    first = _first_layer(model)
    if isinstance(first, torch.nn.Embedding):
        return (ids,), {}
    if first is None:
        return None
    parameter = next(first.parameters(), None)
    if isinstance(first, torch.nn.LayerNorm):
        width = tuple(first.normalized_shape)
    elif isinstance(first, torch.nn.TransformerEncoderLayer):
        width = (first.linear1.in_features,)
    else:
        width = (first.in_features,)
    dtype = torch.get_default_dtype() if parameter is None else parameter.dtype
    return (torch.zeros(batch, seq_len, *width, dtype=dtype, device=device),), {}


def call_arguments(
    model: torch.nn.Module, example_inputs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments of a call of ``model``, from the user's example."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if example_inputs is None:
        made = made_arguments(model)
        if made is None:
            raise CaptureError(
                f"{type(model).__name__} does not declare its inputs: pass example_inputs, a tuple of "
                "positional or a dict of keyword arguments"
            )
        args, kwargs = made
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
            and ranks matter (sizes above 1 become symbols). None: token ids for a Hugging Face model, or what the first
            layer of a model with one required argument reads: ids for an embedding, vectors for a linear layer or a
            norm.

    Raises:
        CaptureError: names the operation and the module that could not be captured, and what to do.
    """
    args, kwargs = call_arguments(model, example_inputs)
    without_weights = all(p.is_meta for p in model.parameters())
    captured = capture_graph(model, args, kwargs, repeat=without_weights)
    return IR(type(model).__name__, captured, model, (args, kwargs))
