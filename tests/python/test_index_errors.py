"""An index out of range raises IndexError, as in PyTorch, and the message names module, index and range."""

from __future__ import annotations

import copy

import deepwell
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from users import tally


class Looks(nn.Module):
    def __init__(self, looks):
        super().__init__()
        self.words, self.lin, self.looks = nn.Embedding(5, 4), nn.Linear(4, 5), looks

    def forward(self, index):
        return self.looks(self, index)


LOOKS = {
    "embedding": lambda m, i: m.words(i) * 2.0,
    "tensor index": lambda m, i: m.words.weight[i] * 2.0,
    "index_select": lambda m, i: torch.index_select(m.words.weight, 0, i) * 2.0,
    "gather": lambda m, i: torch.gather(m.words.weight, 0, i.view(-1, 1)) * 2.0,
    "cross_entropy": lambda m, i: F.cross_entropy(m.lin(m.words.weight), i) * 2.0,
}


@pytest.mark.parametrize("bad", [5, 1000, -9])
@pytest.mark.parametrize("name", LOOKS)
def test_index_out_of_range(name, bad, monkeypatch):
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")
    good, wrong = torch.tensor([1, 2, 3, 4, 0]), torch.tensor([1, 2, bad, 4, 0])
    plain = Looks(LOOKS[name])
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    ours(good)
    with pytest.raises(Exception) as expected:  # gather raises RuntimeError, the others IndexError
        plain(wrong)
    with pytest.raises(expected.type) as found:
        ours(wrong)
    assert isinstance(found.value, IndexError)
    shown = (
        bad + 5 if name == "tensor index" and bad < 0 else bad
    )  # negative indices count from the end
    assert str(shown) in str(found.value) and "[0, 5)" in str(found.value)
    if name == "embedding":
        assert "(words)" in str(found.value)
    ours(good).sum().backward()  # and the model still works
    assert tally(ours)[0] >= 2
