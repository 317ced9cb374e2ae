"""Compares optimized modules with plain PyTorch on small random modules.

    .venv/bin/python tests/python/module_fuzz.py --seed 0 --count 200 --jobs 2
    .venv/bin/python tests/python/module_fuzz.py --seed 17 --count 1 --show     # one module, its source and its calls

Each seed makes a module as source text and a script: calls in between changes of state (attributes, globals, modes,
shapes, parameters). The source is executed once for PyTorch and once for Deepwell, each with globals of its own, and
both follow the script. After each call outputs (structure, dtype, shape, value, which are one object, which require
gradients), gradients of parameters and inputs, buffers, attributes and globals must agree.

The tolerance is measured: PyTorch follows the script again with parameters and inputs changed by
one unit of float32's rounding, several times. If that does not explain a difference, the result of
each operation is changed as well. If a value changes by d, the engine's may differ by a multiple of
d, and by the rounding of as many operations as the module has.

Two differences are documented in docs/optimize.md and counted separately: the engine supports a
``view`` that the strides of an argument do not allow, where PyTorch raises an error; and an
argument that is returned unchanged may be that tensor itself. The program ends with status 1 if
there is any other. Differences are marked where the module computes in bfloat16 or float16
(``--no-casts`` makes no such modules) or returns views of one another (``--no-views``).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import linecache
import os
import random
import sys
import types
import warnings
from dataclasses import dataclass, field
from typing import Any, Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepwell  # noqa: E402
import torch  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

WIDTH = 8
EPS = 2.0**-23
# The tolerance, as a multiple of the effect of one unit of rounding in all inputs. Each operation
# rounds too.
AMPLIFICATION = 64
NOISES = 3
# Number of repetitions for a second look: steps (bfloat16, integers, comparisons) change rarely.
MORE_NOISES = 40

HEAD = """\
import collections, os, random, types
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

NUMBER = 1.5
TABLE = {"a": 0.5, "b": [1.0, 2.0]}
LIST = [0.75, 1.25]
TENSOR = torch.tensor(1.25)
VECTOR = torch.linspace(-1.0, 1.0, 8)
ARRAY = np.array([0.5, 1.5], dtype=np.float32)
QUEUE = collections.deque([0.5, 2.0])
LOG = []
FLAGS = types.SimpleNamespace(fast=True, scale=1.125)
ACTIVE = {"tanh"}

class Slotted:
    __slots__ = ("k", "other")
    def __init__(self, k):
        self.k = k
        self.other = 2.0

class Plain:
    rate = 0.5
    def __init__(self, k):
        self.k = k
        self.inner = Slotted(k)
        self.items = [k, 2 * k]
    def value(self):
        return self.k * self.rate

OBJECT = Plain(1.25)

def make():
    held = 0.5
    def get(extra=1.0, numbers=[0.25]):
        return held * extra + numbers[0]
    def put(value):
        nonlocal held
        held = value
    return get, put

GET, PUT = make()

def helper(v, k=1.0):
    return v * k * OBJECT.inner.k + LIST[0]

def deeper(v):
    return helper(v, TABLE["a"]) * FLAGS.scale
"""


@dataclass
class Case:
    """A module's source and its script."""

    seed: int
    source: str = ""
    script: list[tuple[str, Any]] = field(default_factory=list)
    operations: int = 0
    low: bool = False  # computes in bfloat16 or float16
    views: bool = False  # outputs may be views of one another


# ---- making modules ----------------------------------------------------------------------------------


class Maker:
    """Statements over variables of shape [rows, 8] and dtype float32."""

    def __init__(self, case: Case, casts: bool, views: bool) -> None:
        self.random = random.Random(case.seed)
        self.case, self.casts, self.views = case, casts, views
        self.lines: list[str] = []
        self.values = ["x"]
        self.changes: list[str] = []
        self.count = 0

    def pick(self) -> str:
        return self.random.choice(self.values[-4:])

    def number(self) -> str:
        return repr(round(self.random.uniform(0.25, 2.0), 3))

    def add(self, expression: str, *before: str, indent: str = "") -> None:
        name = f"v{self.count}"
        self.count += 1
        self.lines += [*before, f"{indent}{name} = {expression}"]
        self.values.append(name)

    def make(self) -> None:
        kinds = [
            (self.layer, 5), (self.unary, 5), (self.binary, 4), (self.reduction, 3), (self.view, 4),
            (self.index, 2), (self.in_place, 3), (self.reading, 5), (self.branch, 2), (self.detached, 1),
            (self.writing, 0.7), (self.question, 0.7), (self.dependent, 0.3), (self.loop, 1),
            (self.cast, 2 if self.casts else 0),
        ]  # fmt: skip
        weights = [weight for _, weight in kinds]
        for _ in range(self.random.randint(3, 9)):
            self.random.choices([kind for kind, _ in kinds], weights)[0]()
        self.case.operations = 4 * self.count + 8
        self.finish()

    # ---- statements --------------------------------------------------------------------------------

    def layer(self) -> None:
        layer = self.random.choice(
            ["self.one", "self.two", "self.norm", "self.block", "self.rms", "self.drop", "self.layers[0]",
             "self.layers[-1]", "self.table", "self.batch"]
        )  # fmt: skip
        v = self.pick()
        if layer == "self.table":
            self.add(f"{v} + self.table(({v}.detach().abs() * 3).long().clamp(max=4)).mean(1)")
        elif layer == "self.batch":
            self.add(f"self.batch({v})" if self.random.random() < 0.3 else f"self.two({v})")
        else:
            self.add(f"{layer}({v})")

    def unary(self) -> None:
        v = self.pick()
        self.add(
            self.random.choice(
                ["torch.tanh({v})", "torch.sin({v})", "F.gelu({v})", "F.relu({v})", "F.silu({v})", "{v}.abs()",
                 "{v}.clamp(-1, 1)", "F.softmax({v}, -1)", "torch.sigmoid({v})", "-{v}", "{v}.square()",
                 "torch.exp({v}.clamp(max=2))", "F.softplus({v})", "torch.log1p({v}.abs())", "{v} ** 3",
                 "F.dropout({v}, 0.0, self.training)", "F.leaky_relu({v}, 0.1)", "torch.where({v} > 0, {v}, {v} * 2)",
                 "{v}.masked_fill({v} > 1, 0.5)", "F.log_softmax({v}, -1)", "F.normalize({v}, dim=-1)",
                 "F.layer_norm({v}, (8,))", "torch.atan({v})", "{v}.nan_to_num()", "torch.rsqrt({v}.square() + 1)"]
            ).format(v=v)
        )  # fmt: skip

    def binary(self) -> None:
        a, b, n = self.pick(), self.pick(), self.number()
        self.add(
            self.random.choice(
                ["{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / (1 + {b}.abs())", "torch.maximum({a}, {b})",
                 "{a} * {n}", "{a} + {n}", "{n} - {a}", "torch.lerp({a}, {b}, 0.25)", "{a} @ self.one.weight",
                 "torch.addcmul({a}, {b}, {b}, value=0.5)", "F.linear({a}, self.two.weight, self.one.bias)",
                 "{a} * self.scale", "torch.einsum('rc,rd->rd', {a}, {b})", "torch.atan2({a}, {b}.abs() + 1)"]
            ).format(a=a, b=b, n=n)
        )  # fmt: skip

    def reduction(self) -> None:
        v = self.pick()
        self.add(
            self.random.choice(
                ["{v} - {v}.mean(-1, keepdim=True)", "{v} * {v}.sum()", "{v} + {v}.amax(0)", "{v} - {v}.var(-1, keepdim=True)",
                 "{v}.cumsum(0)", "{v} / (1 + {v}.norm())", "{v} + torch.logsumexp({v}, -1, keepdim=True)",
                 "{v} + {v}.argmax(-1, keepdim=True)", "{v} * ({v} > 0).float().mean()", "{v} + {v}.std()",
                 "{v} - {v}.min()", "{v} + {v}.topk(2, -1).values.sum(-1, keepdim=True)", "{v} + ({v} > 0).sum(0)"]
            ).format(v=v)
        )  # fmt: skip

    def view(self) -> None:
        v = self.pick()
        self.add(
            self.random.choice(
                ["{v}.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)", "torch.cat([{v}[:, 4:], {v}[:, :4]], -1)",
                 "{v}.flip(0)", "{v}.unsqueeze(1).expand(-1, 3, -1).mean(1)", "torch.roll({v}, 1, -1)",
                 "{v}.t().contiguous().t()", "torch.stack({v}.unbind(-1), -1)", "torch.cat({v}.chunk(2, -1)[::-1], -1)",
                 "{v}[:, ::2].repeat(1, 2)", "{v}.view({v}.shape)", "{v}.reshape({v}.size(0), 8)", "{v}.view(-1).view(-1, 8)",
                 "F.pad({v}[:, 1:-1], (1, 1))", "{v}.narrow(1, 0, 4).repeat(1, 2)", "{v}.transpose(0, 1).transpose(0, 1)",
                 "{v}.movedim(0, 1).t()", "{v}.unflatten(1, (4, 2)).flatten(1)", "torch.split({v}, 4, 1)[1].repeat(1, 2)"]
            ).format(v=v)
        )  # fmt: skip

    def index(self) -> None:
        v = self.pick()
        self.add(
            self.random.choice(
                ["{v}[:, [1, 0, 3, 2, 5, 4, 7, 6]]", "{v}[:, self.order]", "{v} + {v}[0]", "{v} + {v}[-1:]",
                 "{v}.index_select(1, self.order)", "{v}.gather(1, self.order.expand({v}.shape[0], -1))",
                 "{v} + {v}[:, 3, None]", "torch.take_along_dim({v}, self.order[None], 1)", "{v} * torch.eye(8)[2]",
                 "{v} + torch.arange(8)", "{v} + torch.arange({v}.shape[0])[:, None]", "{v}.tril()", "{v} + VECTOR[2]"]
            ).format(v=v)
        )  # fmt: skip

    def in_place(self) -> None:
        v, w = self.pick(), self.pick()
        name = f"v{self.count}"
        change = self.random.choice(
            ["{n}.add_(1)", "{n}.mul_({w})", "{n}[:, 1] = 0", "{n}[:, :2] *= 2", "F.relu({n}, inplace=True)", "{n} += {w}",
             "{n}.t()[0].zero_()", "{n}[0] = {w}[-1]", "{n}.view(-1)[::3].mul_(0.5)", "{n}.masked_fill_({w} > 0, 0.25)",
             "{n}.clamp_(min=-0.5)", "{n}.copy_({w})", "{n}[:, [0, 2]] = 1.0", "{n}.sub_({w}, alpha=0.5)"]
        ).format(n=name, w=w if w != name else "x")  # fmt: skip
        self.add(f"{v}.clone()" if self.random.random() < 0.7 else f"{v} * 1.0")
        self.lines.append(change)

    def cast(self) -> None:
        v = self.pick()
        template, low = self.random.choice(
            [("{v}.to(torch.bfloat16).float()", True), ("({v}.bfloat16() * 2 + 1).float()", True),
             ("torch.tanh({v}.half()).float()", True), ("({v}.to(torch.bfloat16) + {v}.bfloat16()).to(x.dtype)", True),
             ("{v}.double().float()", False), ("({v} * 4).to(torch.int32).float()", False), ("({v} > 0).to({v}.dtype)", False),
             ("({v} * 3).long() % 3 + {v}", False), ("{v}.type_as(x)", False), ("({v}.double() * 3).to(torch.float32)", False),
             ("(({v} * 5).int() // 2).float() + {v}", False), ("F.linear({v}.bfloat16(), self.one.weight.bfloat16()).float()", True)]
        )  # fmt: skip
        self.case.low |= low
        self.add(template.format(v=v))

    def reading(self) -> None:
        v = self.pick()
        expression, change = self.random.choice(
            [("{v} * NUMBER", "globals()['NUMBER'] = {n}"), ("{v} * TABLE['a']", "TABLE['a'] = {n}"),
             ("{v} * TABLE['b'][1]", "TABLE['b'][1] = {n}"), ("{v} + LIST[-1]", "LIST[-1] = {n}"),
             ("{v} + sum(LIST)", "LIST.append({n})"), ("{v} * TENSOR", "TENSOR.fill_({n})"),
             ("{v} * TENSOR", "globals()['TENSOR'] = torch.tensor({n})"), ("{v} + VECTOR", "VECTOR.mul_({n})"),
             ("{v} + VECTOR", "VECTOR.data = torch.full((8,), {n})"), ("{v} * float(ARRAY[0])", "ARRAY[0] = {n}"),
             ("{v} * QUEUE[0]", "QUEUE.appendleft({n})"), ("{v} * FLAGS.scale", "FLAGS.scale = {n}"),
             ("{v} * OBJECT.k", "OBJECT.k = {n}"), ("{v} * OBJECT.inner.k", "OBJECT.inner.k = {n}"),
             ("{v} * OBJECT.value()", "Plain.rate = {n}"), ("{v} * OBJECT.items[1]", "OBJECT.items[1] = {n}"),
             ("{v} * OBJECT.value()", "OBJECT.rate = {n}"), ("{v} * Plain.rate", "Plain.rate = {n}"),
             ("{v} * GET()", "PUT({n})"), ("{v} * GET()", "GET.__defaults__[1][0] = {n}"), ("helper({v})", "LIST[0] = {n}"),
             ("deeper({v})", "OBJECT.inner.k = {n}"), ("deeper({v})", "FLAGS.scale = {n}"),
             ("{v} * self.k", "model.k = {n}"), ("{v} * self.cfg.k", "model.cfg.k = {n}"),
             ("{v} * self.slotted.k", "model.slotted.k = {n}"), ("{v} * self.numbers[0]", "model.numbers[0] = {n}"),
             ("{v} * self.options['k']", "model.options['k'] = {n}"), ("{v} + self.plain", "model.plain.mul_({n})"),
             ("{v} + self.plain", "model.plain = torch.full((8,), {n})"), ("{v} + self.held", "model.held.fill_({n})"),
             ("{v} + self.held", "model.held = torch.full((8,), {n})"), ("{v} * self.rate", "type(model).rate = {n}"),
             ("self.act({v})", "model.act = torch.sin"), ("{v} * self.tensors[0]", "model.tensors[0] = torch.tensor({n})"),
             ("({v} if 'tanh' in ACTIVE else -{v})", "ACTIVE.clear()"), ("{v} * (2.0 if FLAGS.fast else 0.5)", "FLAGS.fast = False"),
             ("{v} * getattr(self.cfg, 'k')", "model.cfg.k = {n}"), ("{v} * vars(self.cfg)['k']", "model.cfg.k = {n}"),
             ("{v} * self.one.gain", "model.one.gain = {n}"), ("self.part({v})", "model.cfg.inner.k = {n}"),
             ("{v} * self.one.bias[0].detach()", "model.one.bias.data.add_({n})"),
             ("{v} * float(os.environ.get('FUZZ', '1.5'))", "pass"), ("self.renamed({v})", "model.renamed = model.part"),
             ("{v} * next(iter(TABLE.values()))", "TABLE.pop('a')\nTABLE['a'] = {n}\nTABLE['b'] = TABLE.pop('b')")]
        )  # fmt: skip
        if "TABLE.pop" in change:
            change = "TABLE['a'] = {n}"
        self.add(expression.format(v=v))
        self.changes.append(change.format(n=self.number()))

    def branch(self) -> None:
        v = self.pick()
        condition = self.random.choice(
            ["self.training", "x.shape[0] > 3", "x.dim() == 2", "self.flag", "x.dtype == torch.float32", "FLAGS.fast",
             "len(LIST) > 2", "self.cfg.k > 1", "x.size(0) % 2 == 0", "isinstance(self.one, nn.Linear)", "x.numel() > 30"]
        )  # fmt: skip
        self.add(
            v,
            f"if {condition}:",
            f"    {v} = {v} * {self.number()}",
            "else:",
            f"    {v} = torch.tanh({v})",
        )
        self.changes.append("model.flag = not model.flag")

    def question(self) -> None:
        v = self.pick()
        condition = self.random.choice(
            ["torch.is_grad_enabled()", "{v}.requires_grad", "x.requires_grad", "x.is_contiguous()", "x.stride(0) == 8",
             "{v}.is_leaf", "{v}.grad_fn is None", "torch.is_inference_mode_enabled()", "self.one.weight.requires_grad",
             "{v}.storage_offset() == 0", "{v}._version == 0", "{v}.is_contiguous()", "self.one.weight.grad is None",
             "torch.get_default_dtype() == torch.float32"]
        ).format(v=v)  # fmt: skip
        self.add(v, f"if {condition}:", f"    {v} = {v} * {self.number()}")

    def writing(self) -> None:
        v = self.pick()
        statement = self.random.choice(
            ["self.held = 0.5 * self.held + {v}.detach().mean(0)", "self._buffers['held'] = self.held * 0.5",
             "self.held.data = self.held * 0.5", "self.held.copy_({v}.detach().mean(0))", "self.held.mul_(0.5)",
             "self.count += 1", "LOG.append(1)", "self.last = {v}.detach()", "FLAGS.scale = FLAGS.scale + 0.5",
             "TABLE['a'] += 0.25", "self.numbers[0] += 0.5", "self.cfg.k += 0.125", "self.slotted.k += 0.125",
             "QUEUE.rotate(1)", "OBJECT.items.append(1)", "Plain.rate = 0.25", "PUT(GET() * 0.5)", "TENSOR.mul_(0.5)",
             "ARRAY[0] += 0.5", "self.one.weight.data.mul_(0.5)", "ACTIVE.add('sin')", "self.plain.add_(1)",
             "self.plain.data = self.plain + 1", "self.one.held = self.held.clone()", "setattr(self, 'k', self.k + 1)",
             "self.__dict__['k'] = self.k * 2", "self.options.update(k=2.5)", "{v}.mark = 1", "self.block[0].eval()",
             "globals()['NUMBER'] = NUMBER + 1", "self.held.detach().add_(1)", "VECTOR[0] = 2.0", "random.random()",
             "self.layers.append(nn.Identity())", "self.plain[:2].mul_(2)", "VECTOR.view(2, 4)[0] += 1",
             "TENSOR.data.fill_(2.0)", "self.tensors[0].detach().add_(1)", "torch.add(self.plain, 1, out=self.plain)", "x.add_(1)", "x[0] = 0.5", "self.register_buffer('held', self.held + 1)"]
        ).format(v=v)  # fmt: skip
        self.lines.append(statement)
        if "VECTOR" in statement or "TENSOR" in statement:
            self.add(f"{v} * VECTOR * TENSOR")
        else:
            self.add(
                f"{v} * self.k * self.cfg.k * TABLE['a'] * NUMBER + self.held + len(LOG) + self.count * self.numbers[0]"
            )

    def dependent(self) -> None:
        v = self.pick()
        self.add(
            *self.random.choice(
                [("{v}", "if {v}.sum() > 0:", "    {v} = {v} * 2"), ("{v} * {v}.max().item()",), ("{v} + {v}[{v} > 0].sum()",),
                 ("{v}", "for _ in range(int({v}.abs().sum()) % 3):", "    {v} = {v} + 1"), ("{v} * len({v}.unique())",),
                 ("{v} * {v}.nonzero().shape[0]",), ("{v} * float(self.one.bias[0])",), ("{v} * TENSOR.item()",),
                 ("{v} * float({v}.detach().numpy().sum())",), ("{v}[torch.randperm(1)[0]] + {v}",)]
            )
        )  # fmt: skip
        last = len(self.lines) - 1
        while last >= 0 and "{v}" in self.lines[last]:
            self.lines[last] = self.lines[last].format(v=v)
            last -= 1

    def detached(self) -> None:
        v = self.pick()
        if self.random.random() < 0.5:
            self.add(f"{v}.detach() * {self.number()} + {self.pick()}")
        else:
            self.add(f"torch.tanh({v})", "with torch.no_grad():", indent="    ")
            self.lines.append(f"{self.values[-1]} = {self.values[-1]} + {v}")

    def loop(self) -> None:
        v = self.pick()
        items, body = self.random.choice(
            [("layer in self.layers", "layer({v})"), ("k in LIST", "{v} * k"), ("k in self.numbers", "{v} + k"),
             ("k in OBJECT.items", "{v} * k"), ("_ in range(x.shape[1] // 4)", "{v} + 0.5"), ("k in TABLE['b']", "{v} + k")]
        )  # fmt: skip
        self.add(v, f"for {items}:", f"    {v} = {body.format(v=v)}")

    # ---- the whole module
    # --------------------------------------------------------------------------

    def finish(self) -> None:
        last, other = self.values[-1], self.pick()
        if last == "x" or self.random.random() < 0.5:
            last = f"self.two({last}) + {last}"
        plain = ["{a}", "({a}, {b} * 2)", "dict(first={a}, second={b} + 1)", "[{a}, None, 3]", "({a}, {a}.sum())",
                 "({a}, {b}.shape[0])", "({a}, x)", "({a}, self.one.weight)", "({a}, ({b} > 0))"]  # fmt: skip
        views = ["(y, y)", "(y, y[:, :4])", "(y, y.t())", "(y.view(-1), y)", "{a}.t()", "y.unbind(1)", "(y, y.detach())",
                 "(y, x[:, :2])", "{a}.expand(2, -1, -1)", "(y, self.held)"]  # fmt: skip
        many = self.views and self.random.random() < 0.3
        self.case.views = many
        self.lines.append(f"y = {last}")
        form = self.random.choice(views if many else plain).format(a="y", b=other)
        body = "\n".join(f"        {line}" for line in [*self.lines, f"return {form}"])
        self.case.source = f"""{HEAD}
class Model(nn.Module):
    rate = 0.75
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.rms = nn.LayerNorm(8), nn.RMSNorm(8)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)])
        self.table, self.drop, self.batch = nn.Embedding(5, 8), nn.Dropout(0.0), nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("held", torch.full((8,), 0.5))
        self.register_buffer("order", torch.tensor([3, 1, 2, 0, 7, 6, 5, 4]))
        self.plain, self.tensors = torch.full((8,), 0.25), [torch.tensor(1.5)]
        self.k, self.flag, self.count, self.numbers = 1.25, True, 0, [0.5, 1.0]
        self.options, self.cfg, self.slotted = {{"k": 0.75}}, Plain(0.5), Slotted(0.25)
        self.act, self.one.gain = torch.tanh, 1.5
    def part(self, v):
        return v * self.cfg.inner.k + self.cfg.value()
    def renamed(self, v):
        return self.part(v) * 2
    def forward(self, x):
{body}
"""
        self.script()

    def script(self) -> None:
        general = [
            "model.eval()", "model.train()", "model.drop.eval()", "model.one.weight.requires_grad_(False)",
            "model.one.weight.data.mul_(1.5)", "model.two.weight = nn.Parameter(model.two.weight.detach() * 2)",
            "model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})",
            "model.one.weight.requires_grad_(True)", "model.zero_grad()", "model.two = nn.Linear(8, 8, bias=False)",
            "model.norm.eps = 0.25", "model.one, model.two = model.two, model.one",
        ]  # fmt: skip
        steps: list[tuple[str, Any]] = [("call", self.call()) for _ in range(2)]
        changes = self.random.sample(self.changes, min(3, len(self.changes)))
        changes += self.random.sample(general, self.random.randint(0, 2))
        self.random.shuffle(changes)
        for change in changes:
            steps += [("change", change), ("call", self.call())]
        steps.append(("call", self.call()))
        self.case.script = steps

    def call(self) -> dict[str, Any]:
        chance = self.random.random
        return {
            "rows": self.random.choice([4, 4, 4, 4, 2, 5]), "seed": self.random.randrange(1000),
            "layout": self.random.choice(["plain"] * 5 + ["columns", "offset", "strided"]),
            "mode": self.random.choice(["grad"] * 4 + ["no_grad", "inference"]),
            "requires_grad": chance() < 0.4, "computed": chance() < 0.2,
        }  # fmt: skip


def make(seed: int, casts: bool = True, views: bool = True) -> Case:
    case = Case(seed)
    Maker(case, casts, views).make()
    return case


# ---- running them ------------------------------------------------------------------------------------


def argument(call: dict[str, Any], noise: torch.Generator | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(call["seed"])
    rows = call["rows"]
    values = torch.randn(rows, WIDTH, generator=generator)
    values = disturbed(values, noise)
    if call["layout"] == "columns":
        values = values.t().contiguous().t()
    elif call["layout"] == "offset":
        values = torch.cat([values[:1], values])[1:]
    elif call["layout"] == "strided":
        values = torch.stack([values, values], -1).flatten(1)[:, ::2]
    values.requires_grad_(call["requires_grad"])
    return values * 1.0 if call["computed"] else values


def disturbed(values: torch.Tensor, noise: torch.Generator | None) -> torch.Tensor:
    if noise is None:
        return values
    return values * (1 + EPS * torch.sign(torch.randn(values.shape, generator=noise)))


class Rounded(TorchDispatchMode):
    """Moves the float32 result of each operation, forward and backward, by at most a unit of rounding."""

    def __init__(self, noise: torch.Generator) -> None:
        super().__init__()
        self.noise = noise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        fresh = all(r.alias_info is None for r in func._schema.returns)
        if not fresh or func._opname in (
            "clone",
            "empty",
            "empty_like",
            "detach",
            "native_dropout",
        ):
            return out
        return pytree.tree_map_only(torch.Tensor, self.moved, out)

    def moved(self, value: torch.Tensor) -> torch.Tensor:
        return value if value.dtype != torch.float32 else disturbed(value, self.noise)


def uneven(values: torch.Tensor) -> torch.Tensor:
    """Returns a loss that no norm or softmax makes constant."""
    values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    return (values * torch.cos(torch.arange(values.numel())).view(values.shape)).sum()


def described(value: Any, depth: int = 0) -> Any:
    """Returns state in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, dict) and depth < 4:
        return [(str(k), described(v, depth + 1)) for k, v in value.items()]
    if hasattr(value, "tolist"):
        return value.tolist()
    if type(value).__name__ in ("list", "tuple", "deque", "set") and depth < 4:
        items = sorted(value) if isinstance(value, set) else value
        return [described(item, depth + 1) for item in items]
    if type(value).__name__ in ("Plain", "Slotted", "SimpleNamespace") and depth < 4:
        names = getattr(value, "__dict__", None) or {n: getattr(value, n) for n in value.__slots__}
        return described(dict(names), depth + 1)
    return type(value).__name__


STATE = (
    "NUMBER",
    "TABLE",
    "LIST",
    "TENSOR",
    "VECTOR",
    "ARRAY",
    "QUEUE",
    "LOG",
    "FLAGS",
    "ACTIVE",
    "OBJECT",
)
ATTRIBUTES = (
    "k",
    "flag",
    "count",
    "numbers",
    "options",
    "cfg",
    "slotted",
    "plain",
    "tensors",
    "last",
)


def follow(
    case: Case,
    optimized: bool,
    noise_seed: int | None = None,
    stop: Callable[[Any], None] = lambda model: None,
    each: bool = False,
) -> list[Any]:
    """Follows the script. Returns a flat list of (what, value) for each call. With `each`, noise is
    added not only to parameters and inputs but to the result of each operation."""
    name = f"<module {case.seed}>"
    linecache.cache[name] = (len(case.source), None, case.source.splitlines(True), name)
    noise = None if noise_seed is None else torch.Generator().manual_seed(noise_seed)
    made = types.ModuleType(f"fuzzed_{case.seed}")
    exec(compile(case.source, name, "exec"), made.__dict__)
    torch.manual_seed(case.seed)
    random.seed(case.seed)
    model = made.Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(disturbed(parameter, noise))
    if optimized:
        deepwell.optimize(model, verbose=False)
    made.__dict__["model"] = model
    records: list[Any] = []
    for index, (kind, step) in enumerate(case.script):
        if kind == "change":
            torch.manual_seed(index)
            try:
                exec(compile(step, name, "exec"), made.__dict__)
            except Exception as error:
                records.append([("error", type(error).__name__)])
            continue
        with Rounded(noise) if each and noise is not None else contextlib.nullcontext():
            records.append(one_call(model, made, step, noise))
    stop(model)
    made.__dict__.clear()
    return records


def addresses(tensor: torch.Tensor) -> set[int]:
    """Returns the address of each element: disjoint parts of one storage count as separate tensors."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride()):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    return {tensor.data_ptr() + tensor.element_size() * at for at in offsets.flatten().tolist()}


def one_call(
    model: Any, made: Any, call: dict[str, Any], noise: torch.Generator | None
) -> list[tuple[str, Any]]:
    record: list[tuple[str, Any]] = []
    torch.manual_seed(call["seed"])
    x = argument(call, noise)
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[
        call["mode"]
    ]
    try:
        with mode():
            returned = model(x)
            leaves, spec = pytree.tree_flatten(returned)
            record.append(("structure", str(spec)))
            first: dict[int, int] = {}
            elements: list[tuple[int, set[int]]] = []
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    record.append((f"output {index}", leaf.detach().clone()))
                    record.append((f"output {index} requires_grad", leaf.requires_grad))
                    record.append((f"output {index} is output", first.setdefault(id(leaf), index)))
                    record.append((f"output {index} is the input", leaf is x))
                    own = addresses(leaf)
                    shared = [other for other, theirs in elements if own & theirs]
                    record.append((f"output {index} overlaps with outputs", shared))
                    elements.append((index, own))
                else:
                    record.append((f"output {index}", leaf))
        losses = [
            uneven(leaf) for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_floating_point()
        ]  # fmt: skip
        if call["mode"] == "grad" and losses:
            if x.requires_grad and not x.is_leaf:
                x.retain_grad()
            sum(losses).backward()
    except Exception as error:
        strides = str(error).startswith(VIEW_ERROR.partition(": ")[2])
        record.append(("error", VIEW_ERROR if strides else type(error).__name__))
    if not x.is_inference():
        record.append(("input", x.detach().clone()))
        record.append(("input's gradient", described(x.grad) if x.requires_grad else None))
    for name, parameter in model.named_parameters():
        record.append((f"{name}", parameter.detach().clone()))
        record.append((f"{name}'s gradient", described(parameter.grad)))
    for name, buffer in model.named_buffers():
        record.append((f"buffer {name}", buffer.detach().clone()))
    for name in ATTRIBUTES:
        record.append((f"attribute {name}", described(getattr(model, name, None))))
    for name in STATE:
        record.append((f"global {name}", described(made.__dict__.get(name))))
    record.append(("rate", (made.Plain.rate, type(model).rate)))
    return record


# ---- comparing ---------------------------------------------------------------------------------------


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (torch.Tensor, float))]


# The record of a call in PyTorch that fails because strides do not allow a view: the only documented
# difference.
VIEW_ERROR = "RuntimeError: view size is not compatible"
REFUSED_VIEW = "a view that PyTorch refuses"
SAME_OBJECT = "is the input: "
# The class of the two differences that docs/optimize.md states.
STATED = "a stated difference"


def failed(record: list[tuple[str, Any]]) -> str:
    """Returns the name of the error that a call raised, or ""."""
    return next((value for what, value in record if what == "error"), "")


def magnitude(value: Any) -> float:
    finite = value[value.isfinite()] if isinstance(value, torch.Tensor) else torch.empty(0)
    return finite.double().abs().max().item() if finite.numel() else 0.0


def differences(case: Case, ours: list[Any], plain: list[Any], noisy: list[list[Any]]) -> list[str]:
    found = []
    # The largest magnitude that each record has had: gradients accumulate, and keep the rounding of
    # sums that later cancel.
    largest: dict[str, float] = {}
    for number, (mine, theirs) in enumerate(zip(ours, plain)):
        others = [run[number] for run in noisy]
        if failed(theirs) == VIEW_ERROR and not failed(mine):
            found.append(f"call {number}: {REFUSED_VIEW}")
            break  # the gradients have diverged
        if [what for what, _ in mine] != [what for what, _ in theirs]:
            found.append(
                f"call {number}: {[w for w, _ in mine if w == 'error']}{mine[-1:]} and {theirs[-1:]}"[
                    :300
                ]
            )
            continue
        for index, ((what, a), (_, b)) in enumerate(zip(mine, theirs)):
            values = [run[index][1] for run in others if len(run) == len(theirs)]
            if what.endswith("gradient"):
                largest[what] = max(largest.get(what, 0.0), magnitude(b))
            reason = differs(case, a, b, values, largest.get(what, 0.0))
            if reason:
                found.append(f"call {number}: {what}: {reason}")
    return found


def differs(case: Case, a: Any, b: Any, noisy: list[Any], before: float = 0.0) -> str:
    """Returns why `a` differs from `b`, or "". Rounding is relative to the largest element, and to
    `before` if that is larger."""
    if isinstance(b, torch.Tensor) and isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
        if not b.numel():
            return ""
        x, y = a.double(), b.double()
        same = (x == y) | (x.isnan() & y.isnan())
        if bool(same.all()):
            return ""
        scale = max(magnitude(y), before) if bool(y.isfinite().any()) else 1.0
        eps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(b.dtype, EPS)
        allowed = torch.full_like(y, eps * case.operations * scale)
        for other in noisy:
            if isinstance(other, torch.Tensor) and other.shape == b.shape:
                moved = (other.double() - y).abs()
                allowed = torch.maximum(
                    allowed, torch.where(moved.isnan(), torch.inf, AMPLIFICATION * moved)
                )
        apart = (x - y).abs()
        bad = ~same & ~(apart <= allowed)
        if not bool(bad.any()):
            return ""
        at = int(torch.where(bad, apart.nan_to_num(nan=torch.inf), -1).argmax())
        return f"{x.flatten()[at]:.9g} and {y.flatten()[at]:.9g} (allowed {allowed.flatten()[at]:.3g}), {int(bad.sum())} of {bad.numel()}"
    if isinstance(b, (list, tuple)) and isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{len(a)} and {len(b)} items"
        for index, (x, y) in enumerate(zip(a, b)):
            others = [
                run[index] for run in noisy if isinstance(run, (list, tuple)) and len(run) == len(b)
            ]
            reason = differs(case, x, y, others)
            if reason:
                return reason
        return ""
    if isinstance(a, float) and isinstance(b, float):
        allowed = max(
            [abs(b - n) * AMPLIFICATION for n in noisy if isinstance(n, float)] + [1e-6 * abs(b)]
        )
        return "" if abs(a - b) <= allowed or a != a and b != b else f"{a} and {b}"
    same = type(a) is type(b) and a == b
    return (
        ""
        if same or any(type(n) is type(a) and n == a for n in noisy)
        else f"{a!r:.80} and {b!r:.80}"
    )


def known(case: Case, found: list[str]) -> str:
    """Returns the known class of differences that a case belongs to, or ""."""
    if all(REFUSED_VIEW in line or SAME_OBJECT in line for line in found):
        return STATED
    about_views = ("overlaps with", "is output", *(["requires_grad"] if case.views else []))
    if all(any(word in line for word in about_views) for line in found):
        return "views"
    return "low precision" if case.low else ""


def check(seed: int, casts: bool, views: bool) -> tuple[int, bool, list[str], str]:
    """Returns (seed, whether the engine ran, differences, their class)."""
    case = make(seed, casts, views)
    served = []

    def served_by(model: Any) -> None:
        served.append(any(unit.calls for unit in reports(model)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = follow(case, False)
        try:
            ours = follow(case, True, None, served_by)
        except Exception as error:
            return seed, False, [f"{type(error).__name__}: {error}"], ""
        noisy = [follow(case, False, noise) for noise in range(NOISES)]
        found = differences(case, ours, plain, noisy)
        if found:
            noisy += [follow(case, False, 100 + noise, each=True) for noise in range(MORE_NOISES)]
            found = differences(case, ours, plain, noisy)
    return seed, bool(served and served[0]), found, known(case, found) if found else ""


def reports(model: Any) -> list[Any]:
    from deepwell.optimize import _installed

    found = {}
    for module in model.modules():
        forward = _installed.get(module)
        if forward is not None:
            found[id(forward.session.report)] = forward.session.report
    return [unit for report in found.values() for unit in report._units.values()]


def _task(arguments: tuple[list[int], bool, bool]) -> list[tuple[int, bool, list[str], str]]:
    os.environ["DEEPWELL_MEASURE"] = "0"  # engines run even where they are slower
    torch.set_num_threads(1)
    seeds, casts, views = arguments
    results = [check(seed, casts, views) for seed in seeds]
    gc.collect()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first module")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--no-casts", action="store_true", help="no conversions of dtypes")
    parser.add_argument("--no-views", action="store_true", help="no outputs that share memory")
    parser.add_argument("--show", action="store_true", help="print each module's source and script")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.count)
    casts, views = not options.no_casts, not options.no_views
    if options.show:
        for seed in seeds:
            case = make(seed, casts, views)
            print(case.source[len(HEAD) :], *case.script, sep="\n")
    chunks = [(list(seeds[i : i + 10]), casts, views) for i in range(0, len(seeds), 10)]
    if options.jobs > 1:
        import multiprocessing

        # Starts new processes now and then, because PyTorch's tracers keep memory.
        pool = multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=10)
        results = pool.imap_unordered(_task, chunks)
    else:
        results = map(_task, chunks)
    done = engine = stated = 0
    kinds: dict[str, int] = {}
    extra = (" --no-casts" if not casts else "") + (" --no-views" if not views else "")
    for chunk in results:
        for seed, served, found, kind in chunk:
            done, engine, stated = done + 1, engine + served, stated + (kind == STATED)
            if found and kind != STATED:
                kinds[kind] = kinds.get(kind, 0) + 1
                print(
                    f"seed {seed}{f' ({kind})' if kind else ''}: {len(found)} differences",
                    flush=True,
                )
                for line in found[:4]:
                    print(f"    {line}")
                print(
                    f"    python tests/python/module_fuzz.py --seed {seed} --count 1 --show{extra}",
                    flush=True,
                )
    text = ", ".join(
        f"{count} of the class '{kind}'" if kind else f"{count} others"
        for kind, count in kinds.items()
    )
    print(
        f"{done} modules, {engine} of them run by the engine, {stated} with {STATED}, "
        f"{sum(kinds.values())} with differences" + (f": {text}" if text else "")
    )
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
