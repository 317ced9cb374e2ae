"""Attention replaced in every family of docs/models.md, in every variant: outputs and gradients are
the same."""

import copy

import pytest
import torch
from attention_tools import FORWARD, attention_nodes, compiled, seen
from compare import assert_same_function
from deepwell.attention import install
from zoo_families import BY_FAMILY, VARIANTS, Variant, available

pytestmark = pytest.mark.usefixtures("attention_on_cpu")


def _parameter(variant: Variant, train: bool):
    marks = []
    if not available(BY_FAMILY[variant.family]):
        marks = [pytest.mark.skip(f"this transformers has no {variant.family}")]
    case = (variant, train)
    name = f"{variant.family}, {variant.name}" + ("" if train else ", eval")
    return pytest.param(*case, id=name, marks=marks)


_AS_WELL = ("plain", "left padding", "around the window")
CASES = [(v, True) for v in VARIANTS] + [(v, False) for v in VARIANTS if v.name in _AS_WELL]


class AtTokens(torch.nn.Module):
    """Compares a model's logits only at tokens. In the rows before them, which see nothing, the eager function
    of a soft-cap model gives noise and ours zeros.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, labels):
        made = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return made.logits[attention_mask.bool()]


@pytest.mark.parametrize(("variant", "train"), [_parameter(*case) for case in CASES])
def test_same_function(variant: Variant, train: bool):
    plain = variant.build().train(train)
    ours = copy.deepcopy(plain)
    made = install.install(ours, "test")
    assert bool(made.replaced) != bool(made.left)
    if variant.family == "gemma2" and "left padding" in variant.name:
        plain, ours = AtTokens(plain), AtTokens(ours)
    generator = torch.Generator().manual_seed(1)
    for batch, length in variant.sizes:
        args, kwargs = variant.arguments(batch, length, generator)
        assert_same_function(plain, ours, args, kwargs)
    mask = kwargs.get("attention_mask")
    masked = "position_ids" in kwargs or (mask is not None and mask.dim() != 2)
    if made.replaced and not masked:
        assert seen(lambda: ours(*args, **kwargs)).ours > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "_train"), [_parameter(v, True) for v in VARIANTS if v.name == "plain"]
)
def test_compiled(variant: Variant, _train: bool):
    """torch.compile gives graphs of operators. A model that breaks the graph by itself does so here
    too."""
    plain = variant.build().train()
    ours = copy.deepcopy(plain)
    made = install.install(ours, "test")
    args, kwargs = variant.arguments(*variant.sizes[0], torch.Generator().manual_seed(1))
    kwargs.pop("labels", None)  # a loss of transformers logs, which breaks a full graph
    torch._dynamo.reset()
    try:
        theirs = torch.compile(plain, fullgraph=True, backend="aot_eager")(*args, **kwargs)
    except torch._dynamo.exc.Unsupported as error:
        pytest.skip(f"not one graph in PyTorch either: {str(error).splitlines()[0]}")
    graphs: list = []
    found = compiled(ours, graphs)(*args, **kwargs)
    torch.testing.assert_close(found[0], theirs[0], rtol=1e-4, atol=1e-5)
    if made.replaced and "attention_mask" not in kwargs:
        assert FORWARD in attention_nodes(graphs)
