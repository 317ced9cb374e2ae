"""Layers: matmuls, norms, attention, dropout and losses."""

from __future__ import annotations

import math
from typing import Any, List, Optional, Sequence, Tuple

from . import dims
from .builder import FLOATS, LoweringError, Value
from .dims import Dim
from .elementwise import add, arithmetic, mul
from .forms import Predicate
from .table import Context, lowers, rounds_once

# ---- matmuls ------------------------------------------------------------------------------------


@lowers("linear")
def linear(c: Context, input: Value, weight: Value, bias: Optional[Value] = None) -> Value:
    if weight.rank == 1:
        y = matmul(c, input, weight)
        return y if bias is None else add(c, y, bias)
    return c.builder.linear(input, weight, bias)


@lowers("matmul")
def matmul(c: Context, self: Value, other: Value) -> Value:
    """Follows torch.matmul's rules: vectors become matrices, batches broadcast, and a batch times one
    matrix is `linear`."""
    b = c.builder
    x, y = self, other
    if x.rank == 1 and y.rank == 1:
        return _dot(c, x, y)
    if x.rank == 1:
        z = matmul(c, b.reshape(x, (1,) + x.shape), y)
        return b.reshape(z, z.shape[:-2] + z.shape[-1:])
    if y.rank == 1:
        z = matmul(c, x, b.reshape(y, y.shape + (1,)))
        return b.reshape(z, z.shape[:-1])
    if y.rank == 2:
        return _times_matrix(c, x, y)
    batch = b.broadcast_shape(x.shape[:-2], y.shape[:-2])
    return b.matmul(b.broadcast(x, batch + x.shape[-2:]), b.broadcast(y, batch + y.shape[-2:]))


@rounds_once
def _dot(c: Context, x: Value, y: Value) -> Value:
    return c.builder.reduce("reduce_sum", c.builder.binary("mul", x, y), (0,), False)


def _times_matrix(c: Context, x: Value, w: Value, bias: Optional[Value] = None) -> Value:
    node = w.node
    if node is not None and node.op == "permute" and node.attrs["perm"] == (1, 0):
        return c.builder.linear(x, node.inputs[0], bias, transpose_w=1)
    return c.builder.linear(x, w, bias, transpose_w=0)


@lowers("mm")
def mm(c: Context, self: Value, mat2: Value) -> Value:
    return _times_matrix(c, self, mat2)


@lowers("mv", "dot")
def mv(c: Context, self: Value, vec: Value) -> Value:
    return matmul(c, self, vec)


@lowers("bmm")
def bmm(c: Context, self: Value, mat2: Value) -> Value:
    return c.builder.matmul(self, mat2)


@lowers("addmm")
def addmm(
    c: Context, self: Value, mat1: Value, mat2: Value, beta: Any = 1, alpha: Any = 1
) -> Value:
    if beta == 1 and alpha == 1 and self.rank == 1 and self.shape[0] == mat2.shape[1]:
        return _times_matrix(c, mat1, mat2, self)
    return _scaled_matmul(c, self, mat1, mat2, beta, alpha)


@rounds_once
def _scaled_matmul(c: Context, x: Value, a: Value, b: Value, beta: Any, alpha: Any) -> Value:
    return _scaled_sum(c, x, _times_matrix(c, a, b), beta, alpha)


@lowers("baddbmm")
@rounds_once
def baddbmm(
    c: Context, self: Value, batch1: Value, batch2: Value, beta: Any = 1, alpha: Any = 1
) -> Value:
    return _scaled_sum(c, self, c.builder.matmul(batch1, batch2), beta, alpha)


def _scaled_sum(c: Context, x: Value, y: Value, beta: Any, alpha: Any) -> Value:
    if alpha != 1:
        y = mul(c, y, alpha)
    if beta == 0:
        return y
    return add(c, y, mul(c, x, beta) if beta != 1 else x)


@lowers("einsum")
def einsum(c: Context, equation: str, tensors: Sequence[Value], path: Any = None) -> Value:
    """Lowers two operands at a time to one batched matmul, a single operand to permute and sum."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "." in equation or any(len(set(t)) != len(t) for t in terms):
        raise LoweringError(f"einsum {equation!r}: ellipses and diagonals are not supported")
    if not arrow:
        letters = left.replace(",", "")
        result = "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    term, value = terms[0], tensors[0]
    for i in range(1, len(terms)):
        later = set(result).union(*terms[i + 1 :])
        term, value = _contract(c, term, value, terms[i], tensors[i], later)
    summed = tuple(i for i, letter in enumerate(term) if letter not in result)
    value = c.builder.reduce("reduce_sum", value, summed, False)
    term = "".join(letter for letter in term if letter in result)
    return c.builder.permute(value, [term.index(letter) for letter in result])


def _contract(c: Context, a: str, x: Value, z: str, y: Value, later: set) -> Tuple[str, Value]:
    """Multiplies two terms and sums over the letters that no later term needs."""
    b = c.builder
    x, a = _sum_private(c, x, a, set(z) | later)
    y, z = _sum_private(c, y, z, set(a) | later)
    batch = [i for i in a if i in z and i in later]
    summed = [i for i in a if i in z and i not in later]
    rows, columns = [i for i in a if i not in z], [i for i in z if i not in a]
    size = {**dict(zip(z, y.shape)), **dict(zip(a, x.shape))}

    def packed(term: str, value: Value, groups: Sequence[Sequence[str]]) -> Value:
        order = [term.index(i) for i in batch] + [term.index(i) for g in groups for i in g]
        shape = [size[i] for i in batch] + [dims.product(size[i] for i in g) for g in groups]
        return b.reshape(b.permute(value, order), shape)

    contracted = b.matmul(packed(a, x, (rows, summed)), packed(z, y, (summed, columns)))
    letters = batch + rows + columns
    return "".join(letters), b.reshape(contracted, [size[i] for i in letters])


def _sum_private(c: Context, x: Value, term: str, needed: set) -> Tuple[Value, str]:
    axes = tuple(i for i, letter in enumerate(term) if letter not in needed)
    kept = "".join(letter for letter in term if letter in needed)
    return c.builder.reduce("reduce_sum", x, axes, False), kept


# ---- norms --------------------------------------------------------------------------------------


def _rows(
    c: Context, x: Value, normalized_shape: Sequence[Dim], *affine: Optional[Value]
) -> Tuple[Value, List[Optional[Value]]]:
    """Returns x and its weights with the normalized axes merged into one."""
    count = len(normalized_shape)
    size = dims.product(normalized_shape)
    rows = c.builder.reshape(x, x.shape[: x.rank - count] + (size,))
    return rows, [None if w is None else c.builder.reshape(w, (size,)) for w in affine]


def _widest(values: Sequence[Optional[Value]]) -> str:
    """Returns the widest element type. In a norm a 16-bit operand may have weights in F32, and the norm is then computed
    in F32."""
    dtypes = {value.dtype for value in values if value is not None}
    return dtypes.pop() if len(dtypes) == 1 else "f64" if "f64" in dtypes else "f32"


@lowers("layer_norm", "native_layer_norm")
def layer_norm(
    c: Context,
    input: Value,
    normalized_shape: Sequence[Dim],
    weight: Optional[Value] = None,
    bias: Optional[Value] = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    x, (w, shift) = _rows(c, input, normalized_shape, weight, bias)
    wide = _widest((x, w, shift))
    operands = [v if v is None else c.builder.cast(v, wide) for v in (x, w, shift)]
    row = x.shape[:-1]
    y, mean, rstd = c.builder.emit(
        "layer_norm", operands, [(wide, x.shape), (wide, row), (wide, row)], eps=eps
    )
    y = c.builder.cast(c.builder.reshape(y, input.shape), input.dtype)
    if len(c.result_dtypes) == 3:
        kept = row + (1,) * len(normalized_shape)
        return y, c.builder.reshape(mean, kept), c.builder.reshape(rstd, kept)
    return y


@lowers("rms_norm", "_fused_rms_norm")
def rms_norm(
    c: Context,
    input: Value,
    normalized_shape: Sequence[Dim],
    weight: Optional[Value] = None,
    eps: Optional[float] = None,
) -> Any:
    if eps is None:  # PyTorch uses the machine epsilon of the dtype that it computes in
        eps = 2.0**-52 if input.dtype == "f64" else 2.0**-23
    x, (w,) = _rows(c, input, normalized_shape, weight)
    wide = _widest((x, w))
    operands = [v if v is None else c.builder.cast(v, wide) for v in (x, w)]
    row = x.shape[:-1]
    y, rstd = c.builder.emit("rms_norm", operands, [(wide, x.shape), (wide, row)], eps=eps)
    y = c.builder.cast(c.builder.reshape(y, input.shape), c.result_dtypes[0] or wide)
    if len(c.result_dtypes) == 2:
        return y, c.builder.reshape(rstd, row + (1,) * len(normalized_shape))
    return y


@lowers("group_norm")
@rounds_once
def group_norm(
    c: Context,
    input: Value,
    num_groups: int,
    weight: Optional[Value] = None,
    bias: Optional[Value] = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Value:
    b = c.builder
    group = dims.divide(dims.product(input.shape[1:]), num_groups)
    grouped = b.reshape(input, (input.shape[0], num_groups, group))
    row = grouped.shape[:-1]
    y, _mean, _rstd = b.emit(
        "layer_norm", [grouped, None, None],
        [(input.dtype, grouped.shape), (input.dtype, row), (input.dtype, row)], eps=eps,
    )  # fmt: skip
    y = b.reshape(y, input.shape)
    channels = input.shape[1:2] + (1,) * (input.rank - 2)
    if weight is not None:
        y = b.binary("mul", y, b.reshape(weight, channels))
    return y if bias is None else b.binary("add", y, b.reshape(bias, channels))


@lowers("native_group_norm")
@rounds_once
def native_group_norm(
    c: Context,
    input: Value,
    weight: Optional[Value],
    bias: Optional[Value],
    N: Dim,
    C: Dim,
    HxW: Dim,
    group: int,
    eps: float,
) -> Any:
    return group_norm(c, input, group, weight, bias, eps), None, None


@lowers("batch_norm")
@rounds_once
def batch_norm(
    c: Context,
    input: Value,
    weight: Optional[Value],
    bias: Optional[Value],
    running_mean: Optional[Value],
    running_var: Optional[Value],
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Value:
    if training and running_mean is not None:
        raise LoweringError("training updates the buffers running_mean and running_var in place")
    b = c.builder
    row = input.shape[1:2] + (1,) * (input.rank - 2)
    if training:
        axes = (0,) + tuple(range(2, input.rank))
        mean = b.reduce("mean", input, axes, True)
        center = b.binary("sub", input, mean)
        variance = b.reduce("mean", b.binary("mul", center, center), axes, True)
    else:
        if running_mean is None or running_var is None:
            raise LoweringError("there are no running statistics")
        center = b.binary("sub", input, b.reshape(running_mean, row))
        variance = b.reshape(running_var, row)
    rstd = b.unary("rsqrt", b.binary("add", variance, b.scalar_like(variance, eps)))
    y = b.binary("mul", center, rstd)
    if weight is not None:
        y = b.binary("mul", y, b.reshape(weight, row))
    return y if bias is None else b.binary("add", y, b.reshape(bias, row))


# ---- dropout ------------------------------------------------------------------------------------


@lowers("dropout")
def dropout(c: Context, input: Value, p: float, train: bool) -> Value:
    if not train or p == 0:
        return input
    if p == 1:
        return mul(c, input, 0.0)
    b = c.builder
    return b.emit(
        "dropout", [input, b.seed()], [(input.dtype, input.shape)], p=float(p), stream=b.stream()
    )[0]


@lowers("deepwell::router_jitter")
def router_jitter(c: Context, x: Value, width: float) -> Value:
    b = c.builder
    (drawn,) = b.emit(
        "random_uniform", [b.seed()], [("f32", x.shape)], shape=x.shape, stream=b.stream()
    )
    scaled = b.binary("mul", drawn, b.scalar_like(drawn, 2.0 * width))
    return b.cast(b.binary("add", scaled, b.scalar_like(drawn, 1.0 - width)), x.dtype)


@lowers("deepwell::grouped_linear")
def grouped_linear(
    c: Context, x: Value, weight: Value, index: Value, bias: Optional[Value]
) -> Value:
    experts, results, _ = weight.shape
    operands = [x, weight, index, bias]
    return c.builder.emit(
        "grouped_linear", operands, [(x.dtype, (x.shape[0], results))], ignore_index=experts
    )[0]


@lowers("alpha_dropout", "feature_alpha_dropout", "feature_dropout")
def other_dropout(c: Context, input: Value, p: float, train: bool) -> Value:
    if train and p != 0:
        raise LoweringError("only plain dropout is supported, not the alpha and feature variants")
    return input


@lowers("native_dropout")
def native_dropout(c: Context, input: Value, p: float, train: Optional[bool]) -> Any:
    return dropout(c, input, p, train is not False), None


# ---- attention ----------------------------------------------------------------------------------


@lowers("scaled_dot_product_attention")
def attention(
    c: Context,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Optional[Value] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Value:
    b = c.builder
    if scale is None:
        depth = query.shape[-1]
        if not isinstance(depth, int):
            raise LoweringError("attention needs a fixed head size")
        scale = 1.0 / math.sqrt(depth)
    if isinstance(dropout_p, float) and dropout_p >= 1.0:
        raise LoweringError("attention with a dropout probability of 1 is not supported")
    q, k, v = _four_axes(c, query, key, value, enable_gqa)
    k, v = _shared_heads(q, k, v)
    mask, causal, window = _mask(c, q, k, attn_mask, query.rank)
    if is_causal:
        causal = 1
    attrs = {"scale": float(scale), "causal": causal}
    if window >= 0:
        attrs["window"] = window
    inputs: List[Optional[Value]] = [q, k, v, mask]
    if dropout_p > 0:
        inputs.append(b.seed())
        attrs.update(p=float(dropout_p), stream=b.stream())
    else:
        inputs.append(None)
    shape = q.shape[:3] + v.shape[3:]
    o, _lse = b.emit(
        "attention", inputs, [(q.dtype, shape), (_statistics(q.dtype), q.shape[:3])], **attrs
    )
    batch = b.broadcast_shape(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads = query.shape[-3:-2] if query.rank >= 3 else ()
    return b.reshape(o, batch + heads + query.shape[-2:-1] + value.shape[-1:])


def _statistics(dtype: str) -> str:
    """Returns the dtype of attention's row statistics for operands of `dtype`."""
    return "f64" if dtype == "f64" else "f32"


def _four_axes(
    c: Context, q: Value, k: Value, v: Value, grouped: bool
) -> Tuple[Value, Value, Value]:
    """Returns [B, H, S, D] for operands of any rank from 2; batch axes broadcast and merge into B."""
    b = c.builder
    batch = b.broadcast_shape(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    merged = dims.product(batch)
    heads = [x.shape[-3] if x.rank >= 3 else 1 for x in (q, k, v)]
    if not grouped:
        common = b.broadcast_shape(*[(h,) for h in heads])[0]
        heads = [common] * 3
    result = []
    for x, h in zip((q, k, v), heads):
        x = x if x.rank >= 3 else b.reshape(x, (1,) + x.shape)
        x = b.broadcast(x, batch + (h,) + x.shape[-2:])
        result.append(b.reshape(x, (merged,) + x.shape[-3:]))
    q, k, v = result
    if k.shape[1] != v.shape[1]:  # enable_gqa with different numbers of key and value heads
        most = max(k.shape[1], v.shape[1])
        k, v = (_repeated_heads(c, x, most) for x in (k, v))
    return q, k, v


def _repeated_heads(c: Context, x: Value, heads: int) -> Value:
    n, h, s, d = x.shape
    x = c.builder.broadcast(c.builder.reshape(x, (n, h, 1, s, d)), (n, h, heads // h, s, d))
    return c.builder.reshape(x, (n, heads, s, d))


def _shared_heads(q: Value, k: Value, v: Value) -> Tuple[Value, Value]:
    """Returns keys and values before their heads were repeated for the query heads that share them."""
    plain_k, plain_v = _before_repeat(k), _before_repeat(v)
    if plain_k is None or plain_v is None or plain_k.shape[1] != plain_v.shape[1]:
        return k, v
    return plain_k, plain_v


def _before_repeat(x: Value) -> Optional[Value]:
    """Returns [B, Hk, S, D] if x [B, Hk*n, S, D] is its reshape to [B, Hk, 1, S, D], broadcast to n."""
    merge = x.node
    if merge is None or merge.op != "reshape":
        return None
    repeat = merge.inputs[0].node
    if repeat is None or repeat.op != "broadcast" or repeat.outputs[0].rank != 5:
        return None
    spread = repeat.inputs[0]
    n, h, _, s, d = repeat.outputs[0].shape
    if spread.shape != (n, h, 1, s, d) or x.shape[2:] != (s, d) or x.shape[0] != n:
        return None
    source = spread.node
    if source is None or source.op != "reshape" or source.inputs[0].shape != (n, h, s, d):
        return None
    return source.inputs[0]


def _mask(
    c: Context, q: Value, k: Value, mask: Optional[Value], query_rank: int
) -> Tuple[Optional[Value], int, int]:
    """Returns (mask, causal, window) for `attention` from PyTorch's mask."""
    if mask is None:
        return None, 0, -1
    b = c.builder
    if mask.dtype != "bool" and mask.dtype != q.dtype:
        mask = b.cast(mask, q.dtype)
    if mask.rank > 4 or (query_rank < 4 and mask.rank == 4):
        batch = q.shape[0]
        full = mask.shape[-3:]
        if dims.product(mask.shape[:-3]) not in (1, batch):
            raise LoweringError("a mask that broadcasts over one of several batch axes")
        mask = b.reshape(mask, (dims.product(mask.shape[:-3]),) + full)
    mask = b.reshape(mask, (1,) * (4 - mask.rank) + mask.shape)
    causal, window = 0, -1
    if isinstance(mask.form, Predicate):
        known = _closed_mask(mask.form, q.shape[2], k.shape[2])
        if known is not None:
            causal, window = known
            rest = mask.form.rest
            mask = None
            for value in rest:
                mask = value if mask is None else b.binary("and", mask, value)
            return mask, causal, window
    return b._unbroadcast(mask), causal, window


def _closed_mask(form: Predicate, queries: Dim, keys: Dim) -> Optional[Tuple[int, int]]:
    """Returns (causal, window) if they express all of the mask's atoms, else None."""
    causal, window = 0, -1
    for atom in form.atoms:
        coefficients = dict(atom.coefficients)
        if coefficients == {2: 1, 3: -1}:  # query + constant >= key
            if atom.constant == 0 and causal in (0, 1):
                causal = 1
            elif atom.constant == keys - queries and causal in (0, 2):
                causal = 2
            else:
                return None
        elif coefficients == {2: -1, 3: 1} and queries == keys:  # key >= query - constant
            if not isinstance(atom.constant, int) or atom.constant < 0 or window >= 0:
                return None
            window = atom.constant + 1
        else:
            return None
    return causal, window


# ---- losses -------------------------------------------------------------------------------------

_REDUCTIONS = ("none", "mean", "sum")


def _reduction(code: int) -> str:
    return _REDUCTIONS[code]


def _class_rows(c: Context, x: Value) -> Value:
    """Returns x [V], [N, V] or [N, V, d...] as [T, V]."""
    b = c.builder
    if x.rank == 1:
        return b.reshape(x, (1,) + x.shape)
    if x.rank > 2:
        x = b.permute(x, [0] + list(range(2, x.rank)) + [1])
    return b.reshape(x, (dims.product(x.shape[:-1]), x.shape[-1]))


@lowers("cross_entropy_loss")
@rounds_once
def cross_entropy(
    c: Context,
    self: Value,
    target: Value,
    weight: Optional[Value] = None,
    reduction: int = 1,
    ignore_index: Any = -100,
    label_smoothing: float = 0.0,
) -> Value:
    if weight is not None:
        raise LoweringError("cross_entropy with class weights is not supported")
    if target.dtype in FLOATS:
        raise LoweringError("cross_entropy with class probabilities as target is not supported")
    b = c.builder
    x = _class_rows(c, self)
    flat = b.cast(b.reshape(target, x.shape[:1]), "i64")
    name = _reduction(reduction)
    shape = x.shape[:1] if name == "none" else ()
    loss, _lse = b.emit(
        "cross_entropy",
        [x, flat],
        [(x.dtype, shape), (x.dtype, x.shape[:1])],
        reduction=name,
        ignore_index=ignore_index,
        label_smoothing=float(label_smoothing),
    )
    return b.reshape(loss, target.shape) if name == "none" else loss


@lowers("nll_loss", "nll_loss_nd", "nll_loss2d")
def nll_loss(
    c: Context,
    self: Value,
    target: Value,
    weight: Optional[Value] = None,
    reduction: int = 1,
    ignore_index: Any = -100,
) -> Value:
    """Lowers nll_loss of log_softmax(x) to cross_entropy of x."""
    node = self.node
    if node is None or node.op != "log_softmax" or node.attrs["axis"] != min(1, self.rank - 1):
        raise LoweringError("nll_loss is supported on the result of log_softmax only")
    return cross_entropy(c, node.inputs[0], target, weight, reduction, ignore_index)


@lowers("mse_loss")
def mse_loss(c: Context, self: Value, target: Value, reduction: int = 1) -> Value:
    difference = arithmetic(c, "sub", self, target)
    return _reduced_loss(c, c.builder.binary("mul", difference, difference), reduction)


@lowers("l1_loss")
def l1_loss(c: Context, self: Value, target: Value, reduction: int = 1) -> Value:
    return _reduced_loss(c, c.builder.unary("abs", arithmetic(c, "sub", self, target)), reduction)


def _reduced_loss(c: Context, x: Value, reduction: int) -> Value:
    name = _reduction(reduction)
    if name == "none":
        return x
    op = "mean" if name == "mean" else "reduce_sum"
    return c.builder.reduce(op, x, tuple(range(x.rank)), False)


# ---- patches ------------------------------------------------------------------------------------


@lowers("conv1d", "conv2d", "conv3d")
def convolution_of_patches(
    c: Context,
    input: Value,
    weight: Value,
    bias: Optional[Value] = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    """Lowers a convolution whose windows are adjacent (a vision model's patch embedding, or a kernel of one
    element) to a linear layer over patches."""
    kernel = weight.shape[2:]
    axes = len(kernel)
    stride, padding, dilation = (_per_axis(value, axes) for value in (stride, padding, dilation))
    side_by_side = stride == kernel and all(p in (0, "valid") for p in padding)
    if not side_by_side or groups != 1 or any(d != 1 and k != 1 for d, k in zip(dilation, kernel)):
        raise LoweringError(
            "convolutions are supported only if their windows are adjacent: stride equal to the "
            "kernel, no padding, no dilation, one group"
        )
    b = c.builder
    x = input if input.rank == axes + 2 else b.reshape(input, (1,) + input.shape)
    batch, channels = x.shape[:2]
    counts = c.shape[-axes:]
    split: Tuple[Dim, ...] = (batch, channels)
    for axis, (count, size) in enumerate(zip(counts, kernel), 2):
        x = b.slice_axis(x, axis, 0, count * size)  # a rest that fills no window is not read
        split += (count, size)
    places = [2 + 2 * i for i in range(axes)]
    patches = b.permute(b.reshape(x, split), [0, *places, 1, *(place + 1 for place in places)])
    rows = b.reshape(patches, (batch,) + counts + (dims.product((channels,) + kernel),))
    flat = b.reshape(weight, (weight.shape[0], dims.product((channels,) + kernel)))
    y = b.permute(b.linear(rows, flat, bias), [0, axes + 1, *range(1, axes + 1)])
    return b.reshape(y, c.shape)


def _per_axis(value: Any, axes: int) -> Tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        return (value,) * axes
    return tuple(value) if len(value) == axes else tuple(value) * axes


@lowers("convolution")
def convolution(
    c: Context,
    input: Value,
    weight: Value,
    bias: Optional[Value],
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Value:
    if transposed:
        raise LoweringError("transposed convolutions are not supported")
    return convolution_of_patches(c, input, weight, bias, stride, padding, dilation, groups)
