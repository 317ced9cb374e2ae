"""Whole trainings follow PyTorch's losses."""

import copy

import deepwell
import pytest
import torch
from zoo import BY_NAME, small_gpt2


@pytest.mark.parametrize(
    "optimizer, name",
    [
        pytest.param(torch.optim.AdamW, "gpt2", id="torch-gpt2"),
        pytest.param(deepwell.AdamW, "llama", id="deepwell-llama"),
        pytest.param(torch.optim.AdamW, "llama", id="torch-llama", marks=pytest.mark.slow),
        pytest.param(deepwell.AdamW, "gpt2", id="deepwell-gpt2", marks=pytest.mark.slow),
    ],
)
def test_losses_over_200_steps(name: str, optimizer, always) -> None:
    """Losses within 1e-3 of PyTorch's FP32 losses over 200 steps on a learnable sequence."""
    case = BY_NAME[name]
    plain = case.build().train()
    ours = deepwell.optimize(copy.deepcopy(plain), verbose=False)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    our_optimizer = optimizer(ours.parameters(), lr=1e-3)
    vocabulary = plain.config.vocab_size
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(200):
        start = torch.randint(0, vocabulary, (4, 1), generator=generator)
        stride = torch.randint(1, 4, (4, 1), generator=generator)
        ids = (start + stride * torch.arange(24)) % vocabulary
        pair = []
        for model, step in ((plain, plain_optimizer), (ours, our_optimizer)):
            step.zero_grad()
            loss = model(input_ids=ids, labels=ids.clone()).loss
            loss.backward()
            step.step()
            pair.append(loss.item())
        losses.append(pair)
    first, last = losses[0][0], losses[-1][0]
    assert last < first - 0.5, "the model did not learn, so the comparison would mean little"
    worst = max(abs(a - b) for a, b in losses)
    assert worst <= 1e-3, f"losses part by {worst}"


def test_same_seed_same_bits(always) -> None:
    """With dropout, equal seeds repeat a training bit for bit, and another seed does not."""

    def train(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(7)
        model = small_gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1).train()
        deepwell.optimize(model, verbose=False)
        optimizer = deepwell.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(seed)
        for _ in range(3):
            ids = torch.randint(0, 211, (2, 19))
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids.clone()).loss.backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    first, again, other = train(1), train(1), train(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not all(torch.equal(a, b) for a, b in zip(first, other))


def test_dropout_keeps_the_right_share(always) -> None:
    """Dropout keeps a share 1-p, scaled by 1/(1-p), and its gradient uses the same mask."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.3)).train()
    torch.nn.init.zeros_(model[0].weight)
    torch.nn.init.ones_(model[0].bias)
    deepwell.optimize(model, verbose=False)
    x = torch.randn(512, 64, requires_grad=True)
    y = model(x)
    kept = y != 0
    share = kept.double().mean().item()
    count = kept.numel()
    assert abs(share - 0.7) < 6 * (0.3 * 0.7 / count) ** 0.5
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / 0.7))
    y.sum().backward()
    expected = kept.float().sum(0) / 0.7
    torch.testing.assert_close(model[0].bias.grad, expected)
