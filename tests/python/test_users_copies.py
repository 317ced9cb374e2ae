"""Copies, files and state_dict of an optimized model."""

import copy
import io
import os
import pickle
import subprocess
import sys
import textwrap

import deepwell
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from users import Net, close, optimized, pair, rows, same, same_grads, train_step

AREA = "Copies and files"


@pytest.mark.support("Copies and files", "copy.deepcopy before the first call", "engine")
def test_deepcopy_before(support) -> None:
    plain, ours = pair()
    other = copy.deepcopy(ours)
    same(plain, other, train_step)
    assert all(p.grad is None for p in ours.parameters())
    support.check(other)


@pytest.mark.support("Copies and files", "copy.deepcopy after the first call (EMA)", "engine")
def test_deepcopy_after(support) -> None:
    plain, ours = pair()
    same(plain, ours, train_step)
    with torch.no_grad():
        for model in (plain, ours):
            model.first.weight.mul_(2.0)
    kept, other = copy.deepcopy(plain), copy.deepcopy(ours)
    with torch.no_grad():
        for model in (plain, ours):  # the copies are unaffected
            model.first.weight.zero_()
    same(kept, other, lambda m: m(rows(3)))
    same(plain, ours, lambda m: m(rows(3)))
    support.check(ours, other)


@pytest.mark.support("Copies and files", "torch.optim.swa_utils.AveragedModel", "engine")
def test_averaged_model(support) -> None:
    def train(model):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for seed in range(3):
            optimizer.zero_grad()
            train_step(model, seed)
            optimizer.step()
            average.update_parameters(model)
        with torch.no_grad():
            return average(rows(9)), model(rows(9))

    plain, ours = pair()
    same(plain, ours, train)
    support.check(ours)


@pytest.mark.support("Copies and files", "pickle, torch.save and torch.load of the model", "engine")
def test_pickle_and_save(support) -> None:
    plain, ours = pair()
    ours(rows())
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    unpickled = pickle.loads(pickle.dumps(ours))
    for other in (loaded, unpickled):
        assert other.__dict__["forward"].module is other
        same(copy.deepcopy(plain), other, train_step)
    support.check(loaded, unpickled)


@pytest.mark.slow_emulated
@pytest.mark.support(
    "Copies and files",
    "loading a saved model where Deepwell is not installed",
    "refused",
    "deepwell",
)
def test_unpickled_without_deepwell(support, tmp_path) -> None:
    """The error names the missing package. A model returned by deepwell.restore is saved like an unoptimized one."""
    model = optimized(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()))
    x = rows()
    expected = model(x)
    for name in ("optimized", "restored"):
        torch.save(model, tmp_path / name)
        deepwell.restore(model)
    torch.save((x, expected.detach()), tmp_path / "values")
    program = textwrap.dedent(
        """
        import sys, torch
        sys.modules["deepwell"] = None
        x, expected = torch.load("values")
        torch.testing.assert_close(torch.load("restored", weights_only=False)(x), expected)
        try:
            torch.load("optimized", weights_only=False)
        except ImportError as error:
            print(error)
        """
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    with support.refused(ImportError):
        raise ImportError(found.stdout)


@pytest.mark.slow_emulated
@pytest.mark.support("Copies and files", "a saved model loaded in a new process", "engine")
def test_loaded_in_a_new_process(support, tmp_path) -> None:
    model = optimized(Net())
    expected = model(rows())
    torch.save(model, tmp_path / "model")
    torch.save((rows(), expected.detach()), tmp_path / "values")
    program = textwrap.dedent(
        """
        import torch
        model = torch.load("model", weights_only=False)
        x, expected = torch.load("values")
        torch.testing.assert_close(model(x), expected)
        import deepwell
        print(deepwell.summary(model))
        """
    )
    folder = os.path.dirname(__file__)
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": folder},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert "2 calls by the engine, 0 by PyTorch" in found.stdout  # one engine before it was saved
    support.check(model)


@pytest.mark.support("Copies and files", "state_dict and load_state_dict", "engine")
def test_state_dict(support) -> None:
    plain, ours = pair()
    assert list(ours.state_dict()) == list(plain.state_dict())
    ours(rows())
    assert list(ours.state_dict()) == list(plain.state_dict())
    donor = Net()
    for model in (plain, ours):
        model.load_state_dict(donor.state_dict())
    same(plain, ours, train_step)
    partial = {"first.weight": donor.first.weight.detach() * 2, "unknown": torch.zeros(1)}
    for model in (plain, ours):
        result = model.load_state_dict(partial, strict=False)
        assert result.unexpected_keys == ["unknown"]
    same(plain, ours, train_step)
    support.check(ours)


@pytest.mark.support("Copies and files", "load_state_dict(assign=True)", "engine")
def test_load_by_assignment(support) -> None:
    plain, ours = pair()
    same(plain, ours, train_step)
    donor = Net().state_dict()
    for model in (plain, ours):
        model.load_state_dict({k: v.clone() for k, v in donor.items()}, assign=True)
    same(plain, ours, train_step)
    support.check(ours)
    # Modules like the others: no new capture.
    assert ours.forward.session.report._units[""].captures == 1


@pytest.mark.slow_emulated
@pytest.mark.support("Copies and files", "save_pretrained and from_pretrained", "engine")
def test_save_pretrained(support, tmp_path) -> None:
    from zoo import gpt2

    plain = gpt2(n_layer=1)
    ours = optimized(plain)
    ids = torch.randint(0, 199, (2, 7))
    ours(input_ids=ids)
    ours.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    assert "forward" not in loaded.__dict__
    close(loaded(input_ids=ids).logits, plain(input_ids=ids).logits)
    deepwell.optimize(loaded, verbose=False)
    close(loaded(input_ids=ids).logits, plain(input_ids=ids).logits)
    support.check(ours, loaded)


def test_deepwell_restore_of_a_copy_leaves_the_other() -> None:
    ours = optimized(Net())
    other = copy.deepcopy(ours)
    deepwell.restore(other)
    assert "forward" not in other.__dict__ and "forward" in ours.__dict__
    same_grads(ours, other)
