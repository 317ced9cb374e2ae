"""The tensors of a run: which there are, their names in files, copies for a writer, and reading them back."""

from __future__ import annotations

import os
import sys
from typing import Any, Callable, Iterable, Iterator

import torch

from deepwell import _deepwell
from deepwell.errors import DeepwellError, UnsupportedError

Entry = tuple[str, str, tuple[int, ...], int]

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_MOST_BYTES = 1 << 28  # read at a time


# ---- the model -----------------------------------------------------------------------------------


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the module inside DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def check_sharding(model: torch.nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    if any(isinstance(each, fsdp.FullyShardedDataParallel) for each in model.modules()):
        raise UnsupportedError(
            "Trainer does not support FullyShardedDataParallel (FSDP1), whose parameters have no names of their own; "
            "use torch.distributed.fsdp.fully_shard (FSDP2) or DistributedDataParallel"
        )


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors of the state_dict; of tied ones the first, as save_pretrained does."""
    found: dict[str, torch.Tensor] = {}
    seen: set[Any] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(
                f'the model\'s state_dict has "{name}" of type {type(value).__name__}; a checkpoint of Trainer holds '
                "tensors only"
            )
        if id(value) not in seen:
            seen.add(id(value))
            found[name] = value
    return found


def tied_of(model: torch.nn.Module) -> dict[str, str]:
    """Returns the names that tensors_of leaves out, each with the name that it keeps."""
    first: dict[int, str] = {}
    tied = {}
    for name, value in model.state_dict(keep_vars=True).items():
        kept = first.setdefault(id(value), name)
        if kept != name:
            tied[name] = kept
    return tied


# ---- copies --------------------------------------------------------------------------------------


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole of a sharded tensor (a collective), and any other tensor as it is."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def copies(tensors: dict[str, torch.Tensor], kept: bool) -> dict[str, torch.Tensor]:
    """Copies tensors to memory of the host. Every rank takes part; those with ``kept`` false keep nothing."""
    copied = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if kept:
            copied[name] = torch.empty(full.shape, dtype=full.dtype).copy_(full)
    return copied


def dtype_name(dtype: torch.dtype, name: str) -> str:
    """Returns the name of a dtype in files of tensors."""
    if dtype not in DTYPES:
        raise UnsupportedError(f'"{name}" has the type {dtype}, which files of tensors do not have')
    return DTYPES[dtype]


def entry(name: str, tensor: torch.Tensor) -> Entry:
    return name, dtype_name(tensor.dtype, name), tuple(tensor.shape), tensor.data_ptr()


def write(path: str, tensors: dict[str, torch.Tensor]) -> None:
    _deepwell.safetensors_write(path, tuple(entry(*item) for item in tensors.items()))


# ---- reading -------------------------------------------------------------------------------------


def is_distributed(folder: str | os.PathLike) -> bool:
    """Returns whether a folder is one of torch.distributed.checkpoint."""
    return os.path.isfile(os.path.join(folder, ".metadata"))


def _distributed(folder: str) -> Any:
    from deepwell.training import distributed  # PyTorch's part of it takes long to import

    return distributed.Folder(folder)


def _pieces(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    piece: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        piece.append((name, tensor))
        size += tensor.numel() * tensor.element_size()
        if size >= _MOST_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


@torch.no_grad()
def read_into(path: str, tensors: dict[str, torch.Tensor]) -> None:
    """Reads tensors of the same names, types and shapes; a sharded one takes its shard. ``path``: a file of tensors, or a
    folder with the model's, also one of torch.distributed.checkpoint."""
    if is_distributed(path):
        _distributed(path).read({f"model.{name}": each for name, each in tensors.items()})
        return
    for piece in _pieces(tensors.items()):
        read = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in piece}
        _deepwell.safetensors_read(path, tuple(entry(*item) for item in read.items()))
        for name, tensor in piece:
            tensor.copy_(_as_shard(read[name], tensor))


def _as_shard(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not hasattr(like, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def _read_averages(folder: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of an optimizer's state by their names in optimizer.safetensors."""
    if not is_distributed(folder):
        return read_all(os.path.join(folder, "optimizer.safetensors"))
    source = _distributed(folder)
    names = {}
    for key, (size, _) in source.tensors.items():
        if key.startswith("optim.state.") and len(size) > 0:
            name, _, kind = key[len("optim.state.") :].rpartition(".")
            names[f"{kind}.{name}"] = key
    return {name: each for piece in source.pieces(names) for name, each in piece.items()}


def read_all(path: str) -> dict[str, torch.Tensor]:
    read = {}
    for name, dtype, shape in _deepwell.safetensors_list(path):
        if dtype not in TORCH_DTYPES:
            raise DeepwellError(f'"{path}": "{name}" has the type {dtype}, which PyTorch lacks')
        read[name] = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    _deepwell.safetensors_read(path, tuple(entry(*item) for item in read.items()))
    return read


# ---- the optimizer -------------------------------------------------------------------------------
#
# Tensors of the state are called KEY.PARAMETER, as `deepwell train` calls AdamW's averages. Numbers and the groups are
# JSON.

_AVERAGES = ("exp_avg", "exp_avg_sq")


def names_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the names of the optimizer's parameters in the order of its state_dict."""
    named = {id(param): name for name, param in model.named_parameters()}
    return [
        named.get(id(param), f"group{i}.{j}")
        for i, group in enumerate(optimizer.param_groups)
        for j, param in enumerate(group["params"])
    ]


def to_json(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return {"tensor": value.item(), "dtype": DTYPES[value.dtype]}
    if isinstance(value, (list, tuple)):
        return [to_json(each, where) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnsupportedError(
        f"{where} is a {type(value).__name__}, which a checkpoint of Trainer does not hold; expected numbers and tensors"
    )


def from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["tensor"], dtype=TORCH_DTYPES[value["dtype"]])
    return tuple(from_json(each) for each in value) if isinstance(value, list) else value


def is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer's state is that of `deepwell train`."""
    from deepwell.optim import AdamW

    return type(optimizer) in (AdamW, torch.optim.AdamW) and not any(
        group["amsgrad"] for group in optimizer.param_groups
    )


def split_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the tensors of an optimizer's state by their names in files, and everything else as JSON."""
    names = names_of(model, optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    stored = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, name in enumerate(names):
        state = stored["state"].get(index)
        if state is None:
            if is_adamw(optimizer):  # `deepwell train` has averages of every parameter
                param = params[index]
                for key in _AVERAGES:
                    tensors[f"{key}.{name}"] = torch.zeros_like(param.detach())
            continue
        numbers[name] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                tensors[f"{key}.{name}"] = value
            else:
                where = f'the optimizer\'s state "{key}" of "{name}"'
                numbers[name][key] = to_json(value, where)
    groups = [
        {key: to_json(value, f'the optimizer\'s "{key}"') for key, value in group.items()}
        for group in stored["param_groups"]
    ]
    for group in groups:
        group["params"] = [names[index] for index in group["params"]]
    return in_order(tensors, names), {"groups": groups, "numbers": numbers}


def in_order(tensors: dict[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    """Kind after kind, as `deepwell train` writes them."""
    kinds = dict.fromkeys(key.partition(".")[0] for key in tensors)
    wanted = (f"{kind}.{name}" for kind in kinds for name in names)
    return {key: tensors[key] for key in wanted if key in tensors}


def load_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    path: str,
    kept: dict[str, Any] | None,
    updates: int,
) -> None:
    """``path``: the folder of a checkpoint. ``kept``: the JSON of split_optimizer; None: of `deepwell train`."""
    names = names_of(model, optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    read = _read_averages(path)
    if kept is None:
        if not is_adamw(optimizer):
            raise DeepwellError(
                f'"{path}" holds the averages of AdamW; resume with optimizer="adamw_dw" or "adamw"'
            )
        step = {"tensor": float(updates), "dtype": "F32"}
        numbers: dict[str, Any] = {name: {"step": step} for name in names if updates > 0}
    else:
        numbers = kept["numbers"]
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in read.items():
        kind, _, name = key.partition(".")
        by_name.setdefault(name, {})[kind] = value
    state: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(names):
        if name not in numbers:
            continue
        values = {key: from_json(value) for key, value in numbers[name].items()}
        for key, value in by_name.get(name, {}).items():
            values[key] = _placed(value, params[index])
        if kept is None and not all(key in values for key in _AVERAGES):
            raise DeepwellError(f'"{path}" has no averages of "{name}"; it is of another model')
        state[index] = values
    stored = optimizer.state_dict()
    if kept is not None:
        if len(kept["groups"]) != len(stored["param_groups"]):
            raise DeepwellError(
                f"the checkpoint's optimizer has {len(kept['groups'])} groups of parameters, and this one "
                f"{len(stored['param_groups'])}; make the groups as they were"
            )
        for group, saved in zip(stored["param_groups"], kept["groups"]):
            kept_keys = [key for key in saved if key in group and key != "params"]
            group.update({key: from_json(saved[key]) for key in kept_keys})
    optimizer.load_state_dict({"state": state, "param_groups": stored["param_groups"]})


def _placed(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    if value.shape == param.shape:
        return _as_shard(value, param)
    return value


# ---- norm ----------------------------------------------------------------------------------------


def gradient_norm(grads: list[torch.Tensor]) -> float | torch.Tensor:
    """The Euclidean norm of all gradients, in C as `deepwell train` computes it if they are float32 on the CPU."""
    if all(_is_plain(grad) for grad in grads):
        _deepwell.set_threads(torch.get_num_threads())
        flat: list[int] = []
        for grad in grads:
            flat += (grad.data_ptr(), grad.numel())
        return _deepwell.gradient_norm(flat)
    return whole(torch.nn.utils.get_total_norm(grads))


def _is_plain(grad: torch.Tensor) -> bool:
    return (
        type(grad) is torch.Tensor
        and grad.layout is torch.strided
        and grad.device.type == "cpu"
        and grad.dtype is torch.float32
        and grad.is_contiguous()
    )


def first_not_finite(named: Iterable[tuple[str, torch.Tensor]], norm: Callable[..., Any]) -> str:
    for name, param in named:
        if param.grad is not None and not torch.isfinite(torch.as_tensor(norm([param.grad]))):
            return name
    return "a gradient"
