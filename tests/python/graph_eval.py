"""Evaluates a graph operation by operation in PyTorch: the reference for captures and engines.

It was written from `include/deepwell/ops.h` alone, independently of all other implementations.
Every operation is the plainest expression that PyTorch has for its definition.

    outputs = evaluate(json_text, {"w": tensor, "input_ids": tensor, ...}, {"B": 2, "S": 7})

Floating-point tensors keep their dtypes; with `dtype=torch.float64` the whole graph is computed in
FP64 (every floating-point dtype is read as f64).
"""

from __future__ import annotations

import json
import math
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F

Tensor = torch.Tensor
DTYPES = {
    "bool": torch.bool,
    "i32": torch.int32,
    "i64": torch.int64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
}
ROLES = ("parameter", "input", "constant", "seed")


class GraphError(Exception):
    """The graph violates a rule of ops.h or of the JSON form."""


def evaluate(
    text: str,
    leaves: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    dtype: Optional[torch.dtype] = None,
) -> List[Tensor]:
    graph = json.loads(text)
    _require(graph["format"] == "deepwell.graph" and graph["version"] == 1, "format")
    run = _Run(sizes, dtype)
    for leaf in graph["leaves"]:
        _require(leaf["role"] in ROLES, f"role {leaf['role']}")
        tensor = leaves[leaf["name"]]
        want = run.dtype(leaf["dtype"])
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        shape = run.dims(leaf["shape"])
        _require(tensor.dtype == want, f"{leaf['name']}: {tensor.dtype}, not {want}")
        _require(list(tensor.shape) == shape, f"{leaf['name']}: {list(tensor.shape)} not {shape}")
        run.define(leaf["name"], tensor)
    for node in graph["nodes"]:
        run.node(node)
    return [run.values[name] for name in graph["outputs"]]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise GraphError(message)


def dim_value(dim: Any, sizes: Mapping[str, int]) -> int:
    """Evaluates an int, or a text like "B*S + 1": sums of products of integers and symbols."""
    if isinstance(dim, int):
        return dim
    total = 0
    for sign, term in _terms(dim):
        product = sign
        for factor in term.split("*"):
            factor = factor.strip()
            product *= int(factor) if factor.isdigit() else sizes[factor]
        total += product
    return total


def _terms(text: str):
    sign, term = 1, ""
    for character in text:
        if character in "+-":
            if term.strip():
                yield sign, term
            sign, term = (1 if character == "+" else -1), ""
        else:
            term += character
    yield sign, term


class _Run:
    def __init__(self, sizes: Mapping[str, int], override: Optional[torch.dtype]) -> None:
        self.sizes = sizes
        self.override = override
        self.values: Dict[str, Tensor] = {}

    def dtype(self, name: str) -> torch.dtype:
        dtype = DTYPES[name]
        return self.override if self.override and dtype.is_floating_point else dtype

    def dims(self, dims: Sequence[Any]) -> List[int]:
        return [dim_value(dim, self.sizes) for dim in dims]

    def define(self, name: str, tensor: Tensor) -> None:
        _require(name not in self.values, f"'{name}' is defined twice")
        self.values[name] = tensor

    def node(self, node: Dict[str, Any]) -> None:
        inputs = [None if name is None else self.values[name] for name in node["inputs"]]
        attrs = dict(node["attrs"])
        for key in ("shape", "start", "limit", "low", "high", "size"):
            if key in attrs:
                attrs[key] = self.dims(attrs[key])
        if "dtype" in attrs:
            attrs["dtype"] = self.dtype(attrs["dtype"])
        if isinstance(attrs.get("value"), str):
            attrs["value"] = float(attrs["value"])
        function = OPERATIONS.get(node["op"])
        _require(function is not None, f"unknown operation {node['op']}")
        try:
            result = function(*inputs, **attrs)
        except Exception as error:
            raise GraphError(f"{node['op']} -> {node['outputs']}: {error!r}") from error
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        _require(len(results) == len(node["outputs"]), f"{node['op']}: number of outputs")
        for name, tensor in zip(node["outputs"], results):
            if self.override and tensor.is_floating_point():
                tensor = tensor.to(self.override)
            self.define(name, tensor)


OPERATIONS: Dict[str, Callable[..., Any]] = {}


def op(name: str):
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS[name] = function
        return function

    return register


# ---- elementwise --------------------------------------------------------------------------------

_UNARY = {
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "exp": torch.exp, "log": torch.log,
    "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal, "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh,
    "erf": torch.erf, "sigmoid": torch.sigmoid, "floor": torch.floor, "ceil": torch.ceil,
    "logical_not": torch.logical_not, "is_finite": torch.isfinite,
}  # fmt: skip
for _name, _function in _UNARY.items():
    OPERATIONS[_name] = _function


def _division(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="floor")


_BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": _division, "pow": torch.pow,
    "max": torch.maximum, "min": torch.minimum, "rem": torch.remainder, "eq": torch.eq,
    "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "and": torch.logical_and, "or": torch.logical_or,
}  # fmt: skip


def _strict_binary(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, y: Tensor) -> Tensor:
        _require(x.shape == y.shape, f"shapes {list(x.shape)} and {list(y.shape)}")
        _require(x.dtype == y.dtype, f"dtypes {x.dtype} and {y.dtype}")
        if name in ("and", "or"):
            _require(x.dtype == torch.bool, f"{x.dtype}, not bool")
        elif name not in ("eq", "ne"):
            _require(x.dtype != torch.bool, "bool operands")
        return function(x, y)

    return run


for _name, _function in _BINARY.items():
    OPERATIONS[_name] = _strict_binary(_name, _function)


@op("select")
def select(c: Tensor, x: Tensor, y: Tensor) -> Tensor:
    _require(c.dtype == torch.bool and c.shape == x.shape == y.shape, "operands of select")
    _require(x.dtype == y.dtype, f"dtypes {x.dtype} and {y.dtype}")
    return torch.where(c, x, y)


@op("cast")
def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


@op("stop_gradient")
def stop_gradient(x: Tensor) -> Tensor:
    return x.detach()


# ---- creation -----------------------------------------------------------------------------------


@op("constant")
def constant(dtype: torch.dtype, shape: List[int], value: float) -> Tensor:
    if not dtype.is_floating_point:
        _require(value == int(value), "a fraction as an integer constant")
        value = int(value)
    return torch.full(shape, value, dtype=dtype)


@op("size")
def size(dtype: torch.dtype, size: List[int]) -> Tensor:
    return torch.tensor(size[0], dtype=dtype)


@op("iota")
def iota(dtype: torch.dtype, shape: List[int], axis: int) -> Tensor:
    line = torch.arange(shape[axis], dtype=dtype)
    return line.view([-1 if i == axis else 1 for i in range(len(shape))]).expand(shape)


def philox(key: Sequence[int], counter: np.ndarray) -> np.ndarray:
    """Philox4x32-10 of Salmon et al. (SC'11): counter [n, 4] of uint32."""
    x = counter.astype(np.uint64)
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * x[:, 0], np.uint64(0xCD9E8D57) * x[:, 2]
        x = np.stack(
            [
                (p1 >> np.uint64(32)) ^ x[:, 1] ^ np.uint64(k0),
                p1 & low,
                (p0 >> np.uint64(32)) ^ x[:, 3] ^ np.uint64(k1),
                p0 & low,
            ],
            axis=1,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x.astype(np.uint32)


@op("random_uniform")
def random_uniform(seed: Tensor, shape: List[int], stream: int) -> Tensor:
    """The layout that `src/number/philox.h` documents."""
    seed0, seed1 = (int(s) & 0xFFFFFFFFFFFFFFFF for s in seed.tolist())
    count = math.prod(shape)
    blocks = np.arange((count + 3) // 4, dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    counter = np.zeros((len(blocks), 4), dtype=np.uint64)
    counter[:, 0] = blocks & low
    counter[:, 1] = np.uint64(stream) ^ ((blocks >> np.uint64(32)) << np.uint64(20)) & low
    counter[:, 2], counter[:, 3] = seed1 & 0xFFFFFFFF, seed1 >> 32
    words = philox((seed0 & 0xFFFFFFFF, seed0 >> 32), counter).reshape(-1)[:count]
    numbers = (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    return torch.from_numpy(numbers).view(shape)


# ---- data movement ------------------------------------------------------------------------------


@op("reshape")
def reshape(x: Tensor, shape: List[int]) -> Tensor:
    return x.reshape(shape)


@op("permute")
def permute(x: Tensor, perm: List[int]) -> Tensor:
    return x.permute(perm)


@op("broadcast")
def broadcast(x: Tensor, shape: List[int]) -> Tensor:
    return x.expand(shape)


@op("slice")
def slice_(x: Tensor, start: List[int], limit: List[int], step: Optional[List[int]] = None):
    step = step or [1] * x.dim()
    for axis, (lo, hi, by) in enumerate(zip(start, limit, step)):
        _require(0 <= lo <= hi <= x.shape[axis] and by >= 1, f"slice {lo}:{hi}:{by} on {axis}")
    return x[tuple(slice(lo, hi, by) for lo, hi, by in zip(start, limit, step))]


@op("pad")
def pad(x: Tensor, low: List[int], high: List[int], value: float = 0) -> Tensor:
    _require(min([*low, *high], default=0) >= 0, "negative padding")
    amounts = [n for pair in zip(reversed(low), reversed(high)) for n in pair]
    return F.pad(x, amounts, value=value)


@op("concat")
def concat(*values: Tensor, axis: int) -> Tensor:
    return torch.cat(values, axis)


@op("take")
def take(x: Tensor, i: Tensor, axis: int) -> Tensor:
    _require(i.numel() == 0 or (int(i.min()) >= 0 and int(i.max()) < x.shape[axis]), "index")
    y = x.index_select(axis, i.reshape(-1))
    return y.reshape(x.shape[:axis] + i.shape + x.shape[axis + 1 :])


@op("take_along")
def take_along(x: Tensor, i: Tensor, axis: int) -> Tensor:
    return x.gather(axis, i)


@op("put_along_add")
def put_along_add(i: Tensor, u: Tensor, axis: int, size: List[int]) -> Tensor:
    return torch.zeros(size, dtype=u.dtype).scatter_add(axis, i.long(), u)


# ---- reductions ---------------------------------------------------------------------------------


def _reduction(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, axes: List[int], keep: int = 0) -> Tensor:
        _require(axes == sorted(set(axes)) and axes != [], f"axes {axes}")
        return function(x, axes, bool(keep))

    return run


def _product(x: Tensor, axes: List[int], keep: bool) -> Tensor:
    for axis in reversed(axes):
        x = x.prod(axis, keepdim=keep)
    return x


def _largest(x: Tensor, axes: List[int], keep: bool) -> Tensor:
    return x.any(axes, keep) if x.dtype == torch.bool else x.amax(axes, keep)


def _smallest(x: Tensor, axes: List[int], keep: bool) -> Tensor:
    return x.all(axes, keep) if x.dtype == torch.bool else x.amin(axes, keep)


OPERATIONS["reduce_sum"] = _reduction(lambda x, axes, keep: x.sum(axes, keep))
OPERATIONS["mean"] = _reduction(lambda x, axes, keep: x.mean(axes, keep))
OPERATIONS["reduce_max"] = _reduction(_largest)
OPERATIONS["reduce_min"] = _reduction(_smallest)
OPERATIONS["reduce_prod"] = _reduction(_product)


@op("arg_max")
def arg_max(x: Tensor, axis: int, keep: int = 0) -> Tensor:
    return x.argmax(axis, keepdim=bool(keep))


@op("arg_min")
def arg_min(x: Tensor, axis: int, keep: int = 0) -> Tensor:
    return x.argmin(axis, keepdim=bool(keep))


@op("cumsum")
def cumsum(x: Tensor, axis: int, reverse: int = 0) -> Tensor:
    return x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)


@op("sort")
def sort(x: Tensor, axis: int, descending: int = 0):
    return tuple(torch.sort(x, dim=axis, descending=bool(descending), stable=True))


@op("top_k")
def top_k(x: Tensor, axis: int, size: List[int]):
    values, indices = torch.sort(x, dim=axis, descending=True, stable=True)
    return values.narrow(axis, 0, size[0]), indices.narrow(axis, 0, size[0])


# ---- matmuls ------------------------------------------------------------------------------------


@op("matmul")
def matmul(a: Tensor, b: Tensor, transpose_a: int = 0, transpose_b: int = 0) -> Tensor:
    _require(a.shape[:-2] == b.shape[:-2], f"batches {list(a.shape)}, {list(b.shape)}")
    return (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)


@op("linear")
def linear(x: Tensor, w: Tensor, b: Optional[Tensor] = None, transpose_w: int = 1) -> Tensor:
    y = x @ (w.mT if transpose_w else w)
    return y if b is None else y + b


# ---- composites ---------------------------------------------------------------------------------


@op("relu")
def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


@op("silu")
def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@op("swiglu")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


@op("gelu")
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


@op("softmax")
def softmax(x: Tensor, axis: int) -> Tensor:
    empty = torch.isneginf(x).all(axis, keepdim=True)
    return torch.where(empty, torch.zeros_like(x), torch.softmax(x, axis))


@op("log_softmax")
def log_softmax(x: Tensor, axis: int) -> Tensor:
    return x - torch.logsumexp(x, axis, keepdim=True)


@op("embedding")
def embedding(w: Tensor, i: Tensor, padding_index: int = -1) -> Tensor:
    return take(w, i, 0)


@op("layer_norm")
def layer_norm(x: Tensor, w: Optional[Tensor] = None, b: Optional[Tensor] = None, *, eps: float):
    mean = x.mean(-1)
    center = x - mean.unsqueeze(-1)
    rstd = 1 / torch.sqrt((center * center).mean(-1) + eps)
    y = center * rstd.unsqueeze(-1)
    y = y if w is None else y * w
    return (y if b is None else y + b), mean, rstd


@op("rms_norm")
def rms_norm(x: Tensor, w: Optional[Tensor] = None, *, eps: float):
    rstd = 1 / torch.sqrt((x * x).mean(-1) + eps)
    y = x * rstd.unsqueeze(-1)
    return (y if w is None else y * w), rstd


@op("rope")
def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: int = 0, transposed: int = 0) -> Tensor:
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]

    def quarter_turn(v: Tensor) -> Tensor:
        if interleaved:
            return torch.stack([-v[..., 1::2], v[..., 0::2]], -1).flatten(-2)
        half = v.shape[-1] // 2
        return torch.cat([-v[..., half:], v[..., :half]], -1)

    if transposed:  # the quarter turn's adjoint is its negative
        y = rotated * cos - quarter_turn(rotated * sin)
    else:
        y = rotated * cos + quarter_turn(rotated) * sin
    return torch.cat([y, rest], -1)


@op("dropout")
def dropout(x: Tensor, seed: Tensor, p: float, stream: int) -> Tensor:
    kept = random_uniform(seed, list(x.shape), stream) >= p
    return torch.where(kept, x / (1 - p), torch.zeros_like(x))


@op("attention")
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor] = None, seed: Optional[Tensor] = None,
    *, scale: float, softcap: float = 0.0, causal: int = 0, window: int = -1, p: float = 0.0, stream: int = 0,
):  # fmt: skip
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = scale * (q @ k.mT)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = scores.shape[-2:]
    row, column = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    shift = keys - queries if causal == 2 else 0
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        allowed = allowed & (column <= row + shift)
    if window >= 0:
        allowed = allowed & (column > row + shift - window)
    if mask is not None:
        _require(mask.dim() == 4, "a mask of rank 4")
        if mask.dtype == torch.bool:
            allowed = allowed & mask
        else:
            scores = scores + mask
    scores = torch.where(allowed, scores, torch.full_like(scores, -math.inf))
    lse = torch.logsumexp(scores.to(torch.promote_types(scores.dtype, torch.float32)), -1)
    probabilities = softmax(scores, -1)
    if p > 0:
        kept = random_uniform(seed, list(scores.shape), stream) >= p
        probabilities = torch.where(kept, probabilities / (1 - p), torch.zeros_like(scores))
    return probabilities @ v, lse


@op("cross_entropy")
def cross_entropy(x: Tensor, target: Tensor, reduction: str = "mean", ignore_index: int = -100,
                  label_smoothing: float = 0.0):  # fmt: skip
    log_p = log_softmax(x, -1)
    valid = target != ignore_index
    index = torch.where(valid, target, torch.zeros_like(target))
    _require(bool(((index >= 0) & (index < x.shape[1])).all()), "a target outside the classes")
    picked = -log_p.gather(1, index[:, None])[:, 0]
    loss = (1 - label_smoothing) * picked - label_smoothing * log_p.mean(-1)
    loss = torch.where(valid, loss, torch.zeros_like(loss))
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        loss = loss.sum() / valid.sum()
    return loss, torch.logsumexp(x, -1)
