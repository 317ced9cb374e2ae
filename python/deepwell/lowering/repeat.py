"""Traces layers of one kind once or twice instead of a hundred times.

Tracing takes nearly all of a capture's time, and a deep model repeats one layer many times. While a forward is traced,
each layer of a list has its own forward (an instance attribute):

    the first two layers of a kind run as they are, between two marks in the traced program;
    each later one is a single operation, `copy`, with the layer's tensors as operands.

Lowering replaces a copy by the marked program, with the copy's operands and the copy's own parameters. The rest of the
model runs as it is: everything that it computes between layers, passes to them and keeps of them is traced.

A layer is copied only if its forward cannot distinguish it from the traced one: classes, flags, plain attributes,
shapes and kinds of parameters, hooks, arguments. Integers may differ (a layer's number does) if the traced forward
never read them; they are watched while it runs. A forward with side effects is not copied, except for its entry in a
key-value cache. In case of doubt the layer is traced. If a copy later turns out to be impossible, NotRepeatable is
raised and the whole model is traced.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import threading
import types
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch.utils import _pytree as pytree

from deepwell import routing
from deepwell.contents import SEEN_THROUGH

# Fewer layers of a kind than this are not worth copying.
FEWEST = 3
# This many layers are traced and compared before the rest are assumed to be equal.
_TRACED = 2
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_CONSTANTS = (bool, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)


class NotRepeatable(Exception):
    """Copies cannot represent the layers; the message says why."""


# ---- operations in the traced program -----------------------------------------------------------
# `begin` and `end` mark a traced layer; `copy` stands for a layer that is not traced.

_library = torch.library.Library("deepwell_capture", "DEF")
_library.define("begin(Tensor[] inputs, int site) -> ()")
_library.define("end(Tensor[] outputs, int site) -> ()")
_library.define("copy(Tensor[] inputs, int site, str path) -> Tensor[]")
BEGIN = torch.ops.deepwell_capture.begin.default
END = torch.ops.deepwell_capture.end.default
COPY = torch.ops.deepwell_capture.copy.default
for _mark in (BEGIN, END):
    torch.fx.node.has_side_effect(_mark)  # keeps passes from removing it

_tracing = threading.local()  # .repeats: the Repeats whose trace runs in this thread


def _no_result(tensors: Sequence[torch.Tensor], site: int) -> None:
    return None


def _predicted(inputs: Sequence[torch.Tensor], site: int, path: str) -> List[torch.Tensor]:
    return [
        torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=t.device)
        for t in _tracing.repeats.sites[site].results
    ]


def _no_backward(context: Any, *gradients: Any) -> Any:
    raise RuntimeError("a traced layer has no backward of its own")


torch.library.register_fake("deepwell_capture::begin", _no_result, lib=_library)
torch.library.register_fake("deepwell_capture::end", _no_result, lib=_library)
torch.library.register_fake("deepwell_capture::copy", _predicted, lib=_library)
# Makes results require gradients if operands do, as the layer's own results would.
torch.library.register_autograd("deepwell_capture::copy", _no_backward, lib=_library)


# ---- which layers are equal ---------------------------------------------------------------------


class _Unsure(Exception):
    """A part of a layer cannot be compared with another layer's."""


@dataclass
class Layer:
    path: str
    module: torch.nn.Module
    integers: Dict[Tuple[str, str], int]  # (path of the submodule, attribute): value
    kind: "Kind" = None  # type: ignore[assignment]


@dataclass
class Kind:
    layers: List[Layer] = field(default_factory=list)
    sites: List["Site"] = field(default_factory=list)  # its traced calls

    def varying(self) -> List[Tuple[str, str]]:
        """Returns the integers in which its layers differ."""
        first = self.layers[0].integers
        return [at for at in first if any(x.integers[at] != first[at] for x in self.layers)]


def kinds(module: torch.nn.Module) -> List[Kind]:
    """Returns the layers of lists in `module` that may be equal, by kind, outermost lists first."""
    owners: Dict[int, List[str]] = {}
    for named in (module.named_parameters, module.named_buffers, module.named_modules):
        for name, thing in named(remove_duplicate=False):
            owners.setdefault(id(thing), []).append(name)
    found: List[Kind] = []

    def search(parent: torch.nn.Module, path: str) -> None:
        inside = {}
        if isinstance(parent, (torch.nn.ModuleList, torch.nn.Sequential)):
            inside = _alike(parent, path, owners)
        copied = {id(x.module) for kind in inside.values() for x in kind.layers}
        found.extend(inside.values())
        for name, child in parent.named_children():
            if id(child) not in copied:
                search(child, f"{path}.{name}" if path else name)

    search(module, "")
    return found


def _alike(parent: torch.nn.Module, path: str, owners: Dict[int, List[str]]) -> Dict[Any, Kind]:
    groups: Dict[Any, Kind] = {}
    for name, child in parent.named_children():
        layer = Layer(f"{path}.{name}" if path else name, child, {})
        if "forward" in child.__dict__ or len(list(child.modules())) < 2:
            continue
        with contextlib.suppress(_Unsure):
            key = _description(layer, owners)
            kind = groups.setdefault(key, Kind())
            layer.kind = kind
            kind.layers.append(layer)
    return {key: kind for key, kind in groups.items() if len(kind.layers) >= FEWEST}


def _description(layer: Layer, owners: Dict[int, List[str]]) -> Tuple:
    """Describes everything that the forward could see of the layer, except integers, which are stored in the layer.

    Layers with equal descriptions are equal. Numbers, strings and containers of them are described by value, objects
    inside the layer by their place. Any other object must be the same for all layers.
    """
    inside: Dict[int, str] = {}
    parts: List[Any] = []
    own = layer.path + "."
    for path, m in layer.module.named_modules(remove_duplicate=False):
        here = inside.setdefault(id(m), path)
        parts.append((path, here, type(m)))
        if here != path:
            continue
        for kind, table in (("parameter", m._parameters), ("buffer", m._buffers)):
            for name, tensor in table.items():
                if tensor is not None:
                    full = f"{path}.{name}" if path else name
                    same = inside.setdefault(id(tensor), full)
                    parts.append((kind, name, same, _tensor_kind(tensor)))
                else:
                    parts.append((kind, name, None))
        parts.append(tuple(sorted(m._non_persistent_buffers_set)))
    for identity in inside:
        if any(not (n + ".").startswith(own) for n in owners[identity]):
            raise _Unsure("a part of the layer is also part of something else")
    for path, m in layer.module.named_modules():
        _check_unhooked(path, m)
        for name, value in sorted(m.__dict__.items()):
            if name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                continue
            if name in _HOOKS or name.startswith(("_forward_hooks_", "_forward_pre_hooks_")):
                continue
            if type(value) is int:
                layer.integers[(path, name)] = value
                parts.append((path, name, "an integer"))
            else:
                parts.append((path, name, _value(value, inside)))
    return tuple(parts)


def _check_unhooked(path: str, module: torch.nn.Module) -> None:
    """Checks for hooks inside the layer, which would be lost. Hooks of the layer itself run around its forward,
    traced."""
    if path and any(module.__dict__.get(hooks) for hooks in _HOOKS):
        raise _Unsure(f"hooks on {path}")


def _tensor_kind(tensor: torch.Tensor) -> Tuple:
    return (
        type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device,
        tensor.requires_grad,
    )  # fmt: skip


def _value(value: Any, inside: Dict[int, str]) -> Any:
    if isinstance(value, _CONSTANTS) or type(value) is int:
        return (type(value), repr(value))
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(_value(v, inside) for v in value))
    if isinstance(value, (set, frozenset)):
        return (type(value), tuple(sorted(repr(_value(v, inside)) for v in value)))
    if isinstance(value, dict):
        items = tuple((_value(k, inside), _value(v, inside)) for k, v in value.items())
        return (type(value), items)
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return (type(value), tuple(_value(v, inside) for v in parts))
    if isinstance(value, types.MethodType) and id(value.__self__) in inside:
        return ("method", inside[id(value.__self__)], value.__func__)
    if id(value) in inside:
        return ("inside", inside[id(value)])
    return ("object", id(value))


# ---- watching a forward -------------------------------------------------------------------------


class _Watched:
    """An integer that records whether it was used."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.used = False

    def look(self) -> int:
        self.used = True
        return self.value

    __class__ = property(lambda self: type(self.look()))  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.look(), name)


SEEN_THROUGH[_Watched] = operator.attrgetter("value")  # describing it does not count as a use


def _plain(value: Any) -> Any:
    return value.value if type(value) is _Watched else value


def _watch(operation: Callable, reflected: bool = False) -> Callable:
    def method(self: _Watched, *others: Any) -> Any:
        self.used = True
        operands = [self.value, *map(_plain, others)]
        return operation(*(reversed(operands) if reflected else operands))

    return method


for _name in "add sub mul truediv floordiv mod pow lshift rshift and_ or_ xor".split():
    _operation = getattr(operator, _name)
    setattr(_Watched, f"__{_name.strip('_')}__", _watch(_operation))
    setattr(_Watched, f"__r{_name.strip('_')}__", _watch(_operation, reflected=True))
for _name in "eq ne lt le gt ge neg pos abs invert index".split():
    setattr(_Watched, f"__{_name}__", _watch(getattr(operator, _name)))
for _operation in (divmod, hash, int, float, bool, complex, repr, str, format, round):
    setattr(_Watched, f"__{_operation.__name__}__", _watch(_operation))


@contextlib.contextmanager
def _watched(layer: Layer, at: Sequence[Tuple[str, str]]) -> Iterator[Dict[Tuple, _Watched]]:
    watched = {}
    for path, name in at:
        number = watched[(path, name)] = _Watched(layer.integers[(path, name)])
        layer.module.get_submodule(path).__dict__[name] = number
    try:
        yield watched
    finally:
        for (path, name), number in watched.items():
            attributes = layer.module.get_submodule(path).__dict__
            if attributes.get(name) is number:
                attributes[name] = number.value


def _state(layer: Layer) -> Dict[Tuple[str, str], Any]:
    """Returns what a forward could change in the layer and in plain objects that it holds, by identity."""
    state: Dict[Tuple[str, str], Any] = {}
    for path, m in layer.module.named_modules():
        for name, value in m.__dict__.items():
            state[(path, name)] = value
            if type(value) is _Watched:
                continue
            if isinstance(value, (dict, list, set)):
                content = value.items() if isinstance(value, dict) else value
                state[(path, name + " content")] = [
                    tuple(map(id, x)) if isinstance(x, tuple) else id(x) for x in content
                ]
            elif hasattr(value, "__dict__") and not isinstance(
                value, (torch.nn.Module, torch.Tensor, type, types.FunctionType, types.ModuleType)
            ):
                state[(path, name + " attributes")] = {
                    k: id(v) for k, v in vars(value).items()
                }  # fmt: skip
    return state


def _same_state(before: Dict[Tuple, Any], after: Dict[Tuple, Any]) -> bool:
    if before.keys() != after.keys():
        return False
    for key, value in before.items():
        plain = isinstance(key[1], str) and key[1].endswith((" content", " attributes"))
        if (value != after[key]) if plain else (value is not after[key]):
            return False
    return True


# ---- calls --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    """The prediction of a tensor that a traced layer returns."""

    shape: Tuple[Any, ...]
    stride: Tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass
class Site:
    """A traced call of a layer, and how its results are reassembled."""

    number: int
    layer: Layer
    call: Tuple  # description of its arguments
    used: Dict[Tuple[str, str], int]  # the integers that the forward read
    results: List[_Result]
    output: Any = None  # leaves: ("result", i), ("input", i), ("value", v)
    output_spec: Any = None
    entry: Optional[Dict[str, Any]] = None  # attributes of the cache's new entry, likewise
    index: List[Tuple[str, str]] = field(default_factory=list)  # integers equal to its number
    empty: Tuple = ()  # description of the entry before the call
    twin: int = -1  # an earlier traced call that must have the same program


class _Inline(Exception):
    """The call must be traced."""


class Repeats:
    """One trace of a module with copies of its layers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.kinds = kinds(module)
        self.sites: Dict[int, Site] = {}
        self.copies = 0
        self._site_count = 0

    @property
    def possible(self) -> bool:
        return bool(self.kinds)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Replaces the layers' forwards inside the context."""
        placed = []
        previous = getattr(_tracing, "repeats", None)
        _tracing.repeats = self
        try:
            with _plain_cache_indices():
                for kind in self.kinds:
                    for layer in kind.layers:
                        placed.append(layer.module)
                        layer.module.__dict__["forward"] = self._forward(layer)
                yield
        finally:
            _tracing.repeats = previous
            for module in placed:
                module.__dict__.pop("forward", None)

    def _forward(self, layer: Layer) -> Callable:
        original = type(layer.module).forward

        def recorded(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Returns what mixtures inside record as a part of the result, so that copies have it, too."""
            with routing.collecting() as collected:
                result = original(module, *args, **kwargs)
            return routing.with_records(module, result, collected)

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if getattr(_tracing, "repeats", None) is not self or getattr(_tracing, "inside", False):
                return original(layer.module, *args, **kwargs)
            _tracing.inside = True  # layers inside this one belong to its program
            try:
                result = self._call(layer, recorded, args, kwargs)
                return routing.delivered(layer.module, result)
            finally:
                _tracing.inside = False

        forward.__signature__ = inspect.signature(original.__get__(layer.module))  # type: ignore[attr-defined]
        return forward

    def _call(self, layer: Layer, original: Callable, args: Any, kwargs: Any) -> Any:
        try:
            for path, m in layer.module.named_modules():
                _check_unhooked(path, m)
            call = _Call(layer, args, kwargs)
        except (_Unsure, _Inline):
            return original(layer.module, *args, **kwargs)
        alike = [
            site
            for site in layer.kind.sites
            if site.call == call.description
            and all(layer.integers[at] == number for at, number in site.used.items())
        ]
        if len(alike) >= _TRACED:
            with contextlib.suppress(_Inline):
                return self._copy(layer, alike[-1], call)
        return self._trace(layer, original, call, alike, args, kwargs)

    def _trace(
        self,
        layer: Layer,
        original: Callable,
        call: "_Call",
        alike: List[Site],
        args: Any,
        kwargs: Any,
    ) -> Any:
        number = self._site_count
        self._site_count += 1
        versions = [t._version for t in call.tensors]
        BEGIN(call.tensors, number)
        with _watched(layer, layer.kind.varying()) as watched:
            before = _state(layer)
            result = original(layer.module, *args, **kwargs)
            unchanged = _same_state(before, _state(layer))
        site = Site(number, layer, call.description, {}, [])
        if alike:
            site.twin = alike[0].number
        outputs: List[torch.Tensor] = []
        try:
            site.used = {at: w.value for at, w in watched.items() if w.used}
            if not unchanged or versions != [t._version for t in call.tensors]:
                raise _Inline
            flat, site.output_spec = pytree.tree_flatten(result)
            site.output = [call.described(leaf, outputs) for leaf in flat]
            call.describe_entry(site, outputs)
            site.results = _results(outputs, call.tensors)
        except _Inline:
            site = None  # type: ignore[assignment]
        END(outputs, number)
        if site is not None:
            self.sites[number] = site
            layer.kind.sites.append(site)
        return result

    def _copy(self, layer: Layer, site: Site, call: "_Call") -> Any:
        entry = None if site.entry is None else call.entry(site, layer)
        results = COPY(call.tensors, site.number, layer.path)
        self.copies += 1

        def made(leaf: Tuple[str, Any]) -> Any:
            kind, value = leaf
            if kind == "result":
                return results[value]
            return call.tensors[value] if kind == "input" else value

        if entry is not None:
            for name, value in site.entry.items():
                setattr(entry, name, made(value))
        return pytree.tree_unflatten([made(leaf) for leaf in site.output], site.output_spec)


def _results(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> List[_Result]:
    """Predicts a copy's results. Raises _Inline if they could be distinguished from the layer's own."""
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    memory = {t.untyped_storage()._cdata for t in inputs}
    results = []
    for t in outputs:
        storage = t.untyped_storage()._cdata
        if storage in memory:  # a view
            raise _Inline
        memory.add(storage)
        if t.requires_grad != (differentiable and t.dtype.is_floating_point):
            raise _Inline
        results.append(_Result(tuple(t.shape), t.stride(), t.dtype, t.device))
    return results


class _Call:
    """The arguments of one call of a layer: their tensors, and a description of everything else."""

    def __init__(self, layer: Layer, args: Any, kwargs: Any) -> None:
        self.tensors: List[torch.Tensor] = []
        self.cache: Any = None
        flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_cache)
        parts: List[Any] = [torch.is_grad_enabled(), spec]
        for leaf in flat:
            if isinstance(leaf, torch.Tensor):
                at = self._position(leaf)
                if at is None:
                    at = len(self.tensors)
                    self.tensors.append(leaf)
                parts.append((at, *_example(leaf)))
            elif _is_cache(leaf):
                if self.cache is not None and self.cache is not leaf:
                    raise _Inline
                self.cache = leaf
                parts.append(("cache", id(leaf)))
            elif isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                parts.append((type(leaf), str(leaf.node.expr)))
            elif isinstance(leaf, _CONSTANTS) or type(leaf) is int:
                parts.append((type(leaf), repr(leaf)))
            else:
                raise _Inline
        for name, tensor in self._held(layer):
            self.tensors.append(tensor)
            parts.append(("entry", name, *_example(tensor)))
        self.description = tuple(parts)
        self._entries = _entries(self.cache)

    def _held(self, layer: Layer) -> Iterator[Tuple[str, torch.Tensor]]:
        """Yields scalar tensors in the layer's cache entry. The layer may read them, so they are operands too."""
        for at in layer.kind.varying() if self.cache is not None else ():
            if 0 <= layer.integers[at] < len(self.cache.layers):
                for name, value in sorted(vars(self.cache.layers[layer.integers[at]]).items()):
                    if isinstance(value, torch.Tensor) and value.dim() == 0:
                        if self._position(value) is None:
                            yield name, value

    def _position(self, tensor: torch.Tensor) -> Optional[int]:
        return next((i for i, t in enumerate(self.tensors) if t is tensor), None)

    def described(self, leaf: Any, outputs: List[torch.Tensor]) -> Tuple[str, Any]:
        """Describes a leaf of the result. Appends tensors that the layer made to `outputs`."""
        if isinstance(leaf, torch.Tensor):
            at = self._position(leaf)
            if at is not None:
                return "input", at
            found = next((i for i, t in enumerate(outputs) if t is leaf), None)
            if found is None:
                found = len(outputs)
                outputs.append(leaf)
            return "result", found
        if isinstance(leaf, _CONSTANTS) or type(leaf) is int:
            return "value", leaf
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return "value", leaf
        raise _Inline

    # ---- the key-value cache: each layer fills the entry of its number --------------------------

    def describe_entry(self, site: Site, outputs: List[torch.Tensor]) -> None:
        """Records what the layer did to the cache: it filled the entry of its number."""
        after = _entries(self.cache)
        changed = [i for i, (old, new) in enumerate(zip(self._entries, after)) if old != new]
        if len(after) != len(self._entries) or len(changed) > 1:
            raise _Inline
        if not changed:
            return
        index = changed[0]
        if index < 0 or index >= len(self.cache.layers):  # the cache itself was changed
            raise _Inline
        site.index = [
            at for at in site.layer.kind.varying() if site.layer.integers[at] == index
        ]  # fmt: skip
        if not site.index:
            raise _Inline
        old = {name: same.value for name, same in self._entries[index]}
        site.empty = _empty_entry(type(self.cache.layers[index]), old)
        site.entry = {
            name: self.described(value, outputs)
            for name, value in vars(self.cache.layers[index]).items()
            if name not in old or old[name] is not value
        }

    def entry(self, site: Site, layer: Layer) -> Any:
        """Returns the entry that a copy of the site's layer fills. Raises _Inline if it was not empty in the same
        way."""
        indices = {layer.integers[at] for at in site.index}
        if len(indices) != 1:
            raise _Inline
        index = indices.pop()
        if not 0 <= index < len(self.cache.layers):
            raise _Inline
        entry = self.cache.layers[index]
        if _empty_entry(type(entry), vars(entry)) != site.empty:
            raise _Inline
        return entry


def _example(tensor: torch.Tensor) -> Tuple:
    return (
        tensor.dtype,
        tuple(map(_size, tensor.shape)),
        tuple(map(_size, tensor.stride())),
        tensor.device,
        tensor.requires_grad,
    )


def _size(size: Any) -> Any:
    return size if isinstance(size, int) else str(size.node.expr)


def _is_cache(value: Any) -> bool:
    return any(kind.__name__ == "Cache" for kind in type(value).__mro__) and isinstance(
        getattr(value, "layers", None), list
    )


def _entries(cache: Any) -> List[List[Tuple[str, Any]]]:
    """Returns the attributes of each cache entry, and last those of the cache itself."""
    if cache is None:
        return []
    things = [*cache.layers, cache]
    return [[(name, _Same(value)) for name, value in vars(thing).items()] for thing in things]


class _Same:
    """Compares by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return self.value is other.value


def _empty_entry(kind: type, attributes: Dict[str, Any]) -> Tuple:
    parts: List[Any] = [kind]
    for name, value in sorted(attributes.items()):
        if isinstance(value, torch.Tensor):
            if value.dim() > 0:  # it is not empty
                raise _Inline
            parts.append((name, value.dtype, value.device))
        elif isinstance(value, _CONSTANTS) or type(value) is int:
            parts.append((name, type(value), repr(value)))
        else:
            raise _Inline
    return tuple(parts)


@contextlib.contextmanager
def _plain_cache_indices() -> Iterator[None]:
    """Lets the cache read the watched number of a layer, which selects the entry."""
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    names = [n for n in ("update", "get_seq_length") if cache is not None and n in vars(cache)]
    originals = {name: vars(cache)[name] for name in names}

    def plain(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return method(*map(_plain, args), **{k: _plain(v) for k, v in kwargs.items()})

        return call

    for name, method in originals.items():
        setattr(cache, name, plain(method))
    try:
        yield
    finally:
        for name, method in originals.items():
            setattr(cache, name, method)
