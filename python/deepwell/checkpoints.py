"""Checkpoints to and from torch.distributed.checkpoint (DCP), whose folders any layout of ranks loads.

    deepwell.checkpoints.to_distributed("run/step-000000000200", "sharded")
    deepwell.checkpoints.from_distributed("sharded", "whole")

The names in a DCP folder are those of ``get_state_dict`` under "model" and "optim", so that an FSDP2 run on any number
of ranks loads it:

    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id="sharded")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

Tensors keep their bits and pass through memory a few at a time. A result is complete or absent. docs/reshard.md
describes both directions.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from deepwell import _deepwell
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.training import state
from deepwell.training.writer import TRAINER

if TYPE_CHECKING:  # PyTorch's part of it takes long to import
    from deepwell.training import distributed

MODEL, OPTIMIZER, _EXTRA = "model", "optim", "extra"
_WEIGHTS, _AVERAGES = "model.safetensors", "optimizer.safetensors"
_EXTRA_TENSORS, _EXTRA_VALUES = "extra.safetensors", "extra.json"
# The ends of names of files with tensors, or with a list of such files. The first two are safetensors'.
_KINDS = (
    ".safetensors", ".safetensors.index.json", ".distcp", ".bin", ".bin.index.json", ".pt", ".pth", ".h5", ".msgpack",
    ".gguf", ".onnx",
)  # fmt: skip
# The members of a manifest that sealing a checkpoint writes. The others are the run's.
_SEALED = ("format", "version", "deepwell", "step", "updates", "schedule_steps", "files")
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")


@dataclass
class Resharded:
    """What a conversion wrote."""

    path: str
    step: int
    tensors: int  # of model and optimizer
    bytes: int
    tied: dict[str, str] = field(default_factory=dict)  # other name -> name of the tensor
    kept: list[str] = field(
        default_factory=list
    )  # entries of neither model nor optimizer, in extra.*
    dropped: list[str] = field(default_factory=list)  # entries that files of tensors cannot hold

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        lines = [
            f"{self.path}: step {self.step}, {self.tensors} tensors, {self.bytes / 1e9:.3f} GB"
        ]
        lines += [f"  {name} is another name of {of}" for name, of in self.tied.items()]
        lines += [f"  kept in extra files: {name}" for name in self.kept]
        lines += [f"  not kept: {name}" for name in self.dropped]
        return "\n".join(lines)


# ---- the files of a checkpoint -------------------------------------------------------------------


def _json_of(folder: str, name: str) -> Any:
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as error:
        raise DeepwellError(f'"{path}" is not JSON: {error}') from None


def _manifest(folder: str) -> dict[str, Any] | None:
    """The manifest, after every file has been compared with its hash. None: the folder has none."""
    if not os.path.isfile(os.path.join(folder, "manifest.json")):
        return None
    return json.loads(_deepwell.checkpoint_verify(folder, "{}"))


def _run_of(manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    if manifest is None:
        return {"converted": True}
    return {key: value for key, value in manifest.items() if key not in _SEALED}


def _is_beside(name: str) -> bool:
    """Whether a file of a checkpoint is neither tensors nor a list of files."""
    if name.startswith(".") or name in ("manifest.json", _EXTRA_VALUES):
        return False
    return not name.endswith(_KINDS)


def _copy_beside(source: str, folder: str, also_trainer: bool) -> None:
    """Copies the configuration, the tokenizer's files and, with ``also_trainer``, those of the run."""
    for name in sorted(os.listdir(source)):
        path, target = os.path.join(source, name), os.path.join(folder, name)
        if not os.path.isfile(path) or not _is_beside(name) or os.path.exists(target):
            continue
        if name == TRAINER and not also_trainer:
            continue
        shutil.copyfile(path, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def _write_json(folder: str, name: str, value: Any) -> None:
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def _need_folder(path: str) -> None:
    if not os.path.isdir(path):
        raise DeepwellError(f'there is no folder "{path}"; give the folder of a checkpoint')


@contextlib.contextmanager
def _result(source: str, out: str) -> Iterator[str]:
    """A folder to write into, which takes the place of ``out`` at the end and is removed after a failure."""
    if os.path.realpath(source) == os.path.realpath(out):
        raise DeepwellError(f'"{out}" is the folder to convert; give another folder for the result')
    writer = [*_deepwell.checkpoint_writer(out)]
    try:
        yield writer[1]
        _deepwell.checkpoint_writer_commit(writer[0])
    except (OSError, _deepwell.Error) as error:
        raise DeepwellError(
            f'"{out}" was not written, and what was there stays: {error}'
        ) from error
    finally:
        writer.clear()  # removes the folder, even while a traceback refers to this frame


def _moved(name: str) -> str:
    """The name in a DCP folder of an entry of extra files. One that begins like the names of model or optimizer, as another
    program may have it that calls its model differently, would take their place, and is moved below "extra"."""
    return f"{_EXTRA}.{name}" if name.partition(".")[0] in (MODEL, OPTIMIZER, _EXTRA) else name


def _moved_back(name: str) -> str:
    return name.removeprefix(f"{_EXTRA}.")


# ---- to torch.distributed.checkpoint -------------------------------------------------------------


def _meta(dtype: str, shape: Iterable[int], where: str) -> torch.Tensor:
    if dtype not in state.TORCH_DTYPES:
        raise UnsupportedError(f"{where} has the type {dtype}, which PyTorch lacks")
    return torch.empty(tuple(shape), dtype=state.TORCH_DTYPES[dtype], device="meta")


def _list(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a file or of a folder of shards, without their data."""
    return {
        name: _meta(dtype, shape, f'"{path}": "{name}"')
        for name, dtype, shape in _deepwell.safetensors_list(path)
    }


def _heads(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
    """The head of a language model is its embedding if the file has none of its own."""
    known = set(names)
    classes = config.get("architectures") or [""]
    if "lm_head.weight" in known or not str(classes[0]).endswith(("ForCausalLM", "LMHeadModel")):
        return {}
    return dict([("lm_head.weight", each) for each in _EMBEDDINGS if each in known][:1])


def _split_groups(
    shapes: Mapping[str, torch.Size], decay: float, decay_all: bool
) -> list[dict[str, Any]]:
    """The groups that Trainer and `deepwell train` make: weight decay on matrices, none on the rest."""
    decayed = [name for name, shape in shapes.items() if decay_all or len(shape) >= 2]
    others = [name for name in shapes if name not in set(decayed)]
    made = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in made if group["params"]]


def _groups_of(
    trainer: Mapping[str, Any] | None, manifest: Mapping[str, Any], shapes: Mapping[str, torch.Size]
) -> list[dict[str, Any]]:
    """The optimizer's groups, each with the names of its parameters."""
    if trainer is None:  # `deepwell train`
        options = manifest["options"]
        groups = _split_groups(shapes, options["weight_decay"], bool(options["decay_all"]))
        filled = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
        settings = {
            "lr": options["lr"],
            "betas": (options["beta1"], options["beta2"]),
            "eps": options["eps"],
        }
        return [{**filled, **settings, **group} for group in groups]
    saved = trainer["optimizer"]["groups"]
    if all("params" in group for group in saved):
        return [
            {key: value if key == "params" else state.from_json(value) for key, value in g.items()}
            for g in saved
        ]
    # Trainer of version 0.1 did not write which group a parameter is in.
    decays = [group.get("weight_decay", 0.0) for group in saved]
    made = _split_groups(shapes, decays[0], len(saved) == 1)
    if len(made) != len(saved) or (len(saved) == 2 and decays[1] != 0.0):
        raise UnsupportedError(
            "the checkpoint does not say which parameters each of the optimizer's groups has; resume it once with this "
            "version of Deepwell, save, and convert that checkpoint"
        )
    return [
        {**{key: state.from_json(value) for key, value in group.items()}, "params": names["params"]}
        for group, names in zip(saved, made)
    ]


def _optimizer_state(
    trainer: Mapping[str, Any] | None,
    manifest: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The optimizer's state dict, and for each of its tensors the name in the file."""
    numbers = trainer["optimizer"]["numbers"] if trainer is not None else {}
    by_name: dict[str, dict[str, Any]] = {}
    files: dict[str, str] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition(".")
        by_name.setdefault(name, {})[kind] = value
        files[f"{OPTIMIZER}.state.{name}.{kind}"] = key
    groups = _groups_of(
        trainer, manifest, {name: weights[name].shape for name in by_name if name in weights}
    )
    made: dict[str, Any] = {}
    in_groups = [name for group in groups for name in group["params"]]
    for name in dict.fromkeys([*by_name, *in_groups]):  # the file's order, which the way back keeps
        own = {key: state.from_json(value) for key, value in numbers.get(name, {}).items()}
        values = by_name.get(name, {})
        if "exp_avg" in values and "step" not in own:
            # `deepwell train` has one count for all; a parameter without gradients has averages of zeros.
            own["step"] = torch.tensor(float(manifest["updates"] if trainer is None else 0))
        if own or values:
            made[name] = {**own, **values}
    return {"state": made, "param_groups": groups}, files


def _flat(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """As ``get_state_dict`` with ``flatten_optimizer_state_dict`` has it."""
    made = {
        f"state.{name}.{key}": value
        for name, values in optimizer["state"].items()
        for key, value in values.items()
    }
    for group in optimizer["param_groups"]:
        for name in group["params"]:
            made.update(
                {
                    f"param_groups.{name}.{key}": value
                    for key, value in group.items()
                    if key != "params"
                }
            )
    return made


class _Files:
    """Reads tensors of safetensors files by their names in the DCP folder."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[str, str, torch.Tensor]] = {}

    def add(self, key: str, path: str, name: str, like: torch.Tensor) -> None:
        self.places[key] = (path, name, like)

    def read(self, key: str) -> torch.Tensor:
        path, name, like = self.places[key]
        tensor = torch.empty(like.shape, dtype=like.dtype)
        _deepwell.safetensors_read(path, (state.entry(name, tensor),))
        return tensor

    def bytes(self) -> int:
        return sum(each.numel() * each.element_size() for _, _, each in self.places.values())


def to_distributed(
    folder: str | os.PathLike,
    out: str | os.PathLike,
    *,
    tied: Mapping[str, str] | None = None,
    flat: bool = False,
) -> Resharded:
    """Writes a checkpoint, or a Hugging Face folder, as a folder of torch.distributed.checkpoint.

    ``tied``: further names of tensors (other name -> name); known without it are those of Trainer's checkpoints and of
    language-model heads. ``flat``: the optimizer's groups are named as ``flatten_optimizer_state_dict`` names them.
    The configuration, the tokenizer, the plan, the policy and the state of the run stay files beside.
    """
    from deepwell.training import distributed

    folder, out = os.fspath(folder), os.fspath(out)
    _need_folder(folder)
    manifest = _manifest(folder)
    trainer = _json_of(folder, TRAINER)
    config = _json_of(folder, "config.json") or {}
    weights = _list(folder)
    files = _Files()
    for name, like in weights.items():
        files.add(f"{MODEL}.{name}", folder, name, like)
    aliases = {**_heads(weights, config), **((trainer or {}).get("tied") or {}), **(tied or {})}
    for name, of in aliases.items():
        if of not in weights or name in weights:
            raise DeepwellError(
                f'"{name}" is to be another name of "{of}", but "{folder}" has {"no " if of not in weights else ""}'
                f'"{of if of not in weights else name}"'
            )
    whole: dict[str, Any] = {MODEL: dict(weights)}
    averages = os.path.join(folder, _AVERAGES)
    if os.path.isfile(averages) and manifest is not None:
        tensors = _list(averages)
        optimizer, names = _optimizer_state(trainer, manifest, tensors, weights)
        for key, name in names.items():
            files.add(key, averages, name, tensors[name])
        whole[OPTIMIZER] = _flat(optimizer) if flat else optimizer
    extra = os.path.join(folder, _EXTRA_TENSORS)
    kept: list[str] = []
    if os.path.isfile(extra):
        for name, like in _list(extra).items():
            files.add(_moved(name), extra, name, like)
            whole[_moved(name)] = like
            kept.append(name)
    values = _json_of(folder, _EXTRA_VALUES) or {}
    whole.update({_moved(name): value for name, value in values.items()})
    step = manifest["step"] if manifest is not None else 0
    with _result(folder, out) as target:
        paths = {(MODEL, name): (MODEL, of) for name, of in aliases.items()}
        distributed.write(target, whole, files.read, paths)
        _copy_beside(folder, target, also_trainer=True)
        if not os.path.exists(os.path.join(target, "config.json")):
            _write_json(target, "config.json", {})
        counts = (manifest["updates"], manifest["schedule_steps"]) if manifest else (0, 0)
        _deepwell.checkpoint_seal(target, json.dumps(_run_of(manifest)), step, *counts)
    return Resharded(out, step, len(files.places), files.bytes(), aliases, [*kept, *values], [])


# ---- from torch.distributed.checkpoint -----------------------------------------------------------


def _find_optimizer_key(folder: distributed.Folder) -> str | None:
    """The part of the names before "param_groups", or None without an optimizer."""
    found = set()
    for name in (*folder.tensors, *folder.values):
        head, mark, _ = f".{name}".partition(".param_groups.")
        if mark:
            found.add(head[1:])
    if len(found) > 1:
        raise DeepwellError(
            f'"{folder.path}" has several optimizers ({", ".join(map(repr, sorted(found)))}); name one with optimizer_key'
        )
    return found.pop() if found else None


def _below(key: str, names: Iterable[str]) -> dict[str, str]:
    """Name without the key -> name in the folder."""
    head = f"{key}." if key else ""
    return {name[len(head) :]: name for name in names if name.startswith(head)}


def _find_model_key(folder: distributed.Folder, names: list[str], params: list[str]) -> str:
    """``names``: those outside of the optimizer. The parameters of the optimizer show where the model's names begin."""
    tops = [MODEL, "", *sorted({name.partition(".")[0] for name in names})]
    if not params:
        return MODEL if _below(MODEL, names) and len(_below(MODEL, names)) == len(names) else ""
    wanted = params[0]
    tops += [name[: -len(wanted) - 1] for name in names if name.endswith(f".{wanted}")]
    for key in dict.fromkeys(tops):
        below = _below(key, names)
        if all(name in below for name in params):
            return key
    raise DeepwellError(
        f'"{folder.path}" has no tensor for "{wanted}", a parameter of the optimizer; name the first part of the '
        "model's names with model_key"
    )


@dataclass
class _Optimizer:
    tensors: dict[str, str]  # KEY.NAME -> name in the folder
    rest: dict[str, Any]  # groups and numbers, as JSON
    names: list[str]  # of its parameters, in their order
    updates: int


def _read_groups(folder: distributed.Folder, below: Mapping[str, str]) -> list[dict[str, Any]]:
    entries = [name for name in below if name.startswith("param_groups.")]
    scalars = folder.tensors  # a learning rate may be a tensor
    read = {}
    for name in entries:
        key = below[name]
        read[name[len("param_groups.") :]] = (
            folder.whole(key) if key in scalars else folder.value(key)
        )
    if any(name.partition(".")[2] == "params" and name[0].isdigit() for name in read):
        groups: dict[int, dict[str, Any]] = {}
        for name, value in read.items():
            at, _, key = name.partition(".")
            groups.setdefault(int(at), {})[key] = value
        return [groups[at] for at in sorted(groups)]
    # flatten_optimizer_state_dict: the options of each parameter. Equal ones are a group.
    options: dict[str, dict[str, Any]] = {}
    for name, value in read.items():
        param, _, key = name.rpartition(".")
        options.setdefault(param, {})[key] = value
    found: list[dict[str, Any]] = []
    for param, values in options.items():
        same = next((g for g in found if {**g, "params": 0} == {**values, "params": 0}), None)
        if same is None:
            found.append({**values, "params": [param]})
        else:
            same["params"].append(param)
    return found


def _read_optimizer(folder: distributed.Folder, key: str) -> _Optimizer:
    below = _below(key, [*folder.tensors, *folder.values])
    groups = _read_groups(folder, below)
    names = [name for group in groups for name in group["params"]]
    known = set(names)
    tensors: dict[str, str] = {}
    numbers: dict[str, dict[str, Any]] = {}
    updates = 0
    for name, place in below.items():
        if not name.startswith("state."):
            continue
        param, _, kind = name[len("state.") :].rpartition(".")
        if param not in known:
            raise DeepwellError(
                f'"{folder.path}": "{place}" belongs to no parameter of the optimizer\'s groups'
            )
        where = f'the optimizer\'s state "{kind}" of "{param}"'
        numbers.setdefault(param, {})
        if place in folder.tensors and len(folder.tensors[place][0]) > 0:
            tensors[f"{kind}.{param}"] = place
            continue
        value = folder.whole(place) if place in folder.tensors else folder.value(place)
        numbers[param][kind] = state.to_json(value, where)
        if kind == "step":
            updates = max(updates, int(value))
    rest = {
        "groups": [
            {name: state.to_json(value, f'the optimizer\'s "{name}"') for name, value in g.items()}
            for g in groups
        ],
        "numbers": {name: numbers[name] for name in names if name in numbers},
    }
    return _Optimizer(state.in_order(tensors, list(numbers)), rest, names, updates)


def _aliases(
    folder: distributed.Folder,
    model: Mapping[str, str],
    config: Mapping[str, Any],
    stated: Mapping[str, str],
) -> dict[str, str]:
    """The names of ``model`` that stand for a tensor of another name."""
    found: dict[str, str] = {}
    for name, of in stated.items():
        if name in model and of in model:
            if not _is_same(folder, model[name], model[of]):
                raise DeepwellError(
                    f'"{folder.path}": "{name}" and "{of}" are not the same, although they are to be tied'
                )
            found[name] = of
    places: dict[Any, str] = {}
    for name, key in model.items():  # of Deepwell: one place with several names
        first = places.setdefault(tuple(folder.place(key)) or key, name)
        if first != name and name not in found:
            found[name] = first
    head = "lm_head.weight"
    if head in model and head not in found and config.get("tie_word_embeddings", True):
        for of in _EMBEDDINGS:
            if of in model and _is_same(folder, model[head], model[of]):
                found[head] = of
    return found


def _is_same(folder: distributed.Folder, a: str, b: str) -> bool:
    if folder.tensors[a] != folder.tensors[b]:
        return False
    if folder.place(a) == folder.place(b):
        return True
    one, other = folder.whole(a), folder.whole(b)
    flat = [each.reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*flat)


def _write_tensors(path: str, folder: distributed.Folder, names: Mapping[str, str]) -> int:
    """Writes a file of tensors (name -> name in the folder) and returns its bytes of data."""
    described = []
    for name, key in names.items():
        shape, dtype = folder.tensors[key]
        described.append((name, state.dtype_name(dtype, name), tuple(shape), 0))
    writer = _deepwell.safetensors_create(path, tuple(described))
    total = 0
    for piece in folder.pieces(names):
        for tensor in piece.values():
            size = tensor.numel() * tensor.element_size()
            _deepwell.safetensors_put(writer, tensor.data_ptr(), size)
            total += size
    _deepwell.safetensors_commit(writer)
    return total


def _check_like(
    folder: distributed.Folder, model: Mapping[str, str], like: str, aliases: Mapping[str, str]
) -> None:
    """The tensors of ``like``, if it has any, must be the model's."""
    if not any(name.endswith(_KINDS[:2]) for name in os.listdir(like)):
        return  # a configuration without weights
    wanted = _list(like)
    for name, each in wanted.items():
        if name in aliases:
            continue
        found = folder.tensors[model[name]] if name in model else None
        if found is None or found[0] != each.shape:
            what = "no such tensor" if found is None else f"the shape {list(found[0])}"
            raise DeepwellError(
                f'"{like}" has "{name}" of shape {list(each.shape)}, and "{folder.path}" has {what}: they are different '
                "models; give the folder of this one"
            )
    more = next((name for name in model if name not in wanted and name not in aliases), None)
    if more is not None:
        raise DeepwellError(
            f'"{folder.path}" has "{more}", which "{like}" has not: they are different models; give the folder of this one'
        )


def _values(folder: distributed.Folder, names: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Entries that are no tensors: those that JSON holds, and the names of the others."""
    kept: dict[str, Any] = {}
    dropped = []
    for name in names:
        try:
            value = folder.value(name)
            if json.loads(json.dumps(value)) != value:
                raise ValueError(name)
            kept[name] = value
        except (DeepwellError, TypeError, ValueError):
            dropped.append(name)
    return kept, dropped


def from_distributed(
    folder: str | os.PathLike,
    out: str | os.PathLike,
    *,
    like: str | os.PathLike | None = None,
    step: int | None = None,
    tied: Mapping[str, str] | None = None,
    model_key: str | None = None,
    optimizer_key: str | None = None,
) -> Resharded:
    """Writes a folder of torch.distributed.checkpoint, of any number of ranks, as a checkpoint of Deepwell.

    ``like``: a Hugging Face folder or a checkpoint whose configuration and tokenizer the result has; not needed for a
    folder of ``to_distributed``. ``step``: steps done; default: the optimizer's count. ``tied``: names that stand for
    another tensor (other name -> name). ``model_key`` and ``optimizer_key``: the first parts of the names; found from
    the optimizer's parameters by default.
    """
    from deepwell.training import distributed

    folder, out = os.fspath(folder), os.fspath(out)
    _need_folder(folder)
    source = distributed.Folder(folder)
    try:
        manifest = _manifest(folder)
    except _deepwell.Error as error:
        raise DeepwellError(
            f"{error}; if another program has saved to this folder since, remove its manifest.json and {TRAINER}"
        ) from None
    beside = folder if manifest is not None or like is None else os.fspath(like)
    config = _json_of(beside, "config.json")
    if config is None:
        raise DeepwellError(
            f'"{beside}" has no config.json; give like=FOLDER, a Hugging Face folder or a checkpoint of the model'
        )
    trainer = _json_of(folder, TRAINER) if manifest is not None else None
    original = str
    if manifest is not None:  # of to_distributed, whose names are known
        original = _moved_back
        model_key = MODEL if model_key is None else model_key
        if optimizer_key is None and _below(OPTIMIZER, [*source.tensors, *source.values]):
            optimizer_key = OPTIMIZER
    elif optimizer_key is None:
        optimizer_key = _find_optimizer_key(source)
    optimizer = _read_optimizer(source, optimizer_key) if optimizer_key is not None else None
    inside = set(_below(optimizer_key, source.tensors).values()) if optimizer_key else set()
    if optimizer is not None and optimizer_key == "":
        inside = {n for n in source.tensors if n.startswith("state.")}
    outside = [name for name in source.tensors if name not in inside]
    if model_key is None:
        model_key = _find_model_key(source, outside, optimizer.names if optimizer else [])
    model = _below(model_key, outside)
    if not model:
        raise DeepwellError(f'"{folder}" has no tensors below "{model_key}"')
    aliases = _aliases(
        source, model, config, {**((trainer or {}).get("tied") or {}), **(tied or {})}
    )
    if like is not None:
        _check_like(source, model, os.fspath(like), aliases)
    names = {name: key for name, key in model.items() if name not in aliases}
    updates = optimizer.updates if optimizer else 0
    if manifest is not None:
        step, updates = manifest["step"], manifest["updates"]
    elif step is None:
        step = updates
    if step < updates:
        raise DeepwellError(f"step is {step}, but the optimizer has counted {updates} updates")
    weights = set(model.values())
    extra = {original(name): name for name in outside if name not in weights}
    in_groups = _below(optimizer_key, source.values) if optimizer_key is not None else {}
    values, dropped = _values(
        source,
        [
            name
            for short, name in _below("", source.values).items()
            if name not in set(in_groups.values())
            or (optimizer_key == "" and not short.startswith(("state.", "param_groups.")))
        ],
    )
    with _result(folder, out) as target:
        total = _write_tensors(os.path.join(target, _WEIGHTS), source, names)
        if extra:
            _write_tensors(os.path.join(target, _EXTRA_TENSORS), source, extra)
        values = {original(name): value for name, value in values.items()}
        if values:
            _write_json(target, _EXTRA_VALUES, values)
        if optimizer is not None:
            path = os.path.join(target, _AVERAGES)
            total += _write_tensors(path, source, optimizer.tensors)
            if manifest is None:
                made = {"version": 1, "optimizer": optimizer.rest, "tied": aliases}
                _write_json(target, TRAINER, made)
        _copy_beside(beside, target, also_trainer=manifest is not None)
        if optimizer is not None:  # else a model without the state of a run
            schedule = manifest["schedule_steps"] if manifest is not None else 0
            run = json.dumps(_run_of(manifest))
            _deepwell.checkpoint_seal(target, run, step, updates, schedule)
    count = len(names) + (len(optimizer.tensors) if optimizer else 0)
    return Resharded(out, step, count, total, aliases, [*extra, *values], dropped)
