"""deepwell.accumulate: the micro-batches of a step share the codes of weights. Results have the bits that they have without
it, and each weight is quantized once in a step."""

import contextlib
import copy
import re
from pathlib import Path

import deepwell as dw
import pytest
import torch
from compilers import needs_blackwell_compiler, needs_compiler
from deepwell.optimize import installed, sessions
from deepwell.targets import Target
from torch.utils.data import Dataset
from transformers.modeling_outputs import SequenceClassifierOutput

pytestmark = pytest.mark.usefixtures("always")

MICRO_BATCHES = 3


class Layers(torch.nn.Module):
    """Layers of awkward sizes, one of them used twice, with a parameter that is no weight."""

    def __init__(self, sizes=(33, 57, 41)) -> None:
        super().__init__()
        first, second, third = sizes
        self.a = torch.nn.Linear(first, second)
        self.b = torch.nn.Linear(second, second)
        self.c = torch.nn.Linear(second, third, bias=False)
        self.scale = torch.nn.Parameter(torch.rand(second) + 0.5)

    def forward(self, x):
        h = torch.tanh(self.a(x)) * self.scale
        return self.c(self.b(torch.tanh(self.b(h))))


def policy(recipe: str, **options) -> dw.PrecisionPolicy:
    return dw.PrecisionPolicy(recipe, [], bf16_share=0.0, **options)


def optimized(recipe: str, target="auto", dtype=torch.float32, device="cpu", **sizes) -> Layers:
    torch.manual_seed(0)
    model = Layers(**sizes).to(device, dtype)
    return dw.optimize(model, precision=policy(recipe), target=target, verbose=False)


def train(model, once: bool, steps: int = 3, rows=(7, 12, 12), between=None, **data):
    """Returns the bits of all losses, gradients and weights. ``between``: called with the model, the step and the
    micro-batch after each backward."""
    torch.manual_seed(1)
    optimizer = dw.AdamW(model.parameters(), lr=3e-2)
    inputs, dtype = model.a.in_features, model.scale.dtype
    found = []
    for step in range(steps):
        with dw.accumulate(model) if once else contextlib.nullcontext():
            for micro in range(MICRO_BATCHES):
                x = torch.randn(rows[micro], inputs, dtype=dtype, **data)
                loss = model(x).square().mean()
                loss.backward()
                found.append(loss.detach())
                if between is not None:
                    between(model, step, micro)
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *[p.detach().clone() for p in model.parameters()]]


def assert_same(found, expected) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


def kept_plans(model):
    """Returns the plans whose weights are quantized by themselves, of the programs that have run."""
    programs = []
    for forward in installed(model):
        for state in forward._states:
            for entries in state.entries.values():
                for entry in entries:
                    programs += [entry.program, *filter(None, [entry._observing])]
    return [plan for program in programs for plan in program.plans() if plan.kept_bytes]


def runs(plan):
    """Returns how often each instruction ran that computes kept values, and each of forward."""
    phases = [line.split()[1] for line in plan.describe().splitlines()[1:]]
    times = [count for count, _, _ in plan.times()]
    found = {phase: {n for p, n in zip(phases, times) if p == phase} for phase in "KF"}
    return found["K"], found["F"]


def blocks(model):
    (session,) = sessions(model)
    return list(session.kept._blocks.values())


@pytest.mark.parametrize("recipe", ["fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4"])
def test_bits_and_counts(recipe):
    """Two shapes of micro-batches share the codes. Gradients of mxfp4 and nvfp4 are rounded stochastically, with the same
    random numbers."""
    expected = train(optimized(recipe), False)
    model = optimized(recipe)
    assert_same(train(model, True), expected)
    plans = kept_plans(model)
    assert len(plans) == 2 and len({plan.kept_layout for plan in plans}) == 1
    (block,) = blocks(model)  # one for both shapes
    assert block.users == 0 and block.segment.bytes == plans[0].kept_bytes > 0
    for plan in plans:
        plan.profile(True)
    train(model, True, steps=4)
    kept, forward = zip(*map(runs, plans))
    # The first micro-batch of a step quantizes, with 7 rows; the two others have 12.
    assert sorted(map(tuple, kept)) == [(0,), (4,)] and sorted(map(tuple, forward)) == [(4,), (8,)]


def test_outside_of_the_context_weights_are_quantized_by_each_call():
    model = optimized("mxfp8")
    train(model, False)
    assert not kept_plans(model) and not blocks(model)
    with dw.accumulate(torch.nn.Linear(3, 3)):  # is not optimized
        pass
    plain = dw.optimize(Layers(), verbose=False)
    with dw.accumulate(plain):
        plain(torch.randn(4, 33)).sum().backward()
    assert not kept_plans(plain)


@needs_compiler
def test_fp8_codes_on_an_emulated_gpu():
    """CUDA graphs: one of the codes, and one of the rest of forward."""
    options = dict(target="emulator:sm_90a", dtype=torch.bfloat16, sizes=(32, 48, 16))
    data = dict(rows=(32, 32, 32), steps=2)
    expected = train(optimized("fp8", **options), False, **data)
    model = optimized("fp8", **options)
    assert_same(train(model, True, **data), expected)
    (plan,) = kept_plans(model)
    text = plan.describe()
    assert text.count(" K quantize_tensor") == 3 and "e4m3[48,32]@kept" in text
    plan.profile(True)
    train(model, True, **data)
    assert runs(plan) == ({2}, {6})


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8", "fp8-block", "mxfp8"])
def test_on_a_gpu(recipe):
    """Codes on tensor cores, and values of MXFP8 in BF16; with fresh gradients in each step, and segments."""
    options, rows = dict(dtype=torch.bfloat16, sizes=(512, 1024, 256)), (256, 64, 64)
    expected = train(optimized(recipe, **options, device="cuda"), False, rows=rows, device="cuda")
    model = optimized(recipe, **options, device="cuda")
    assert_same(train(model, True, rows=rows, device="cuda"), expected)
    plans = kept_plans(model)
    for plan in plans:
        plan.profile(True)
    train(model, True, steps=4, rows=rows, device="cuda")
    assert sorted(tuple(runs(plan)[0]) for plan in plans) == [(0,), (4,)]


@needs_blackwell_compiler
def test_block_codes_on_an_emulated_gpu():
    options = dict(target="emulator:sm_100a", dtype=torch.bfloat16, sizes=(72, 40, 16))
    data = dict(rows=(17, 17, 17), steps=2)
    expected = train(optimized("mxfp8", **options), False, **data)
    model = optimized("mxfp8", **options)
    assert_same(train(model, True, **data), expected)
    assert kept_plans(model)[0].describe().count(" K quantize_tiles") == 3


# ---- changes inside and between steps ----------------------------------------------------------------


def disturb(model, step: int, micro: int) -> None:
    """Does what user code does in the middle of a step: evaluation, other weights, an update."""
    if micro == 0:
        model.eval()
        with torch.no_grad():
            model(torch.randn(5, model.a.in_features))
        model.train()
    if micro == 1 and step == 1:
        state = {name: value * 1.5 for name, value in model.state_dict().items()}
        model.load_state_dict(state)
    if micro == 1 and step == 2:
        with torch.no_grad():
            model.b.weight.mul_(0.25)
            model.c.weight = torch.nn.Parameter(model.c.weight * 2)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_changes_inside_a_step_are_seen(recipe):
    """Evaluation needs no gradients and computes its own codes. PyTorch counts the other changes."""
    expected = train(optimized(recipe), False, between=disturb)
    assert_same(train(optimized(recipe), True, between=disturb), expected)


def test_writes_that_pytorch_does_not_count():
    """Between two contexts any write is seen, since nothing is taken over from the one before."""
    x, results = torch.randn(6, 33), []
    for once in (False, True):
        model, found = optimized("mxfp8"), []
        for _ in range(2):
            with dw.accumulate(model) if once else contextlib.nullcontext():
                for _ in range(2):
                    loss = model(x).square().mean()
                    loss.backward()
                    found.append(loss.detach())
            for parameter in model.parameters():
                before = parameter._version, parameter.data_ptr()
                parameter.data.copy_(parameter.data * 3)
                assert (parameter._version, parameter.data_ptr()) == before
        results.append([*found, *[p.grad for p in model.parameters()]])
    assert_same(*results)
    assert not torch.equal(results[1][0], results[1][2])


def test_a_backward_reads_the_codes_of_its_forward():
    """Codes are not overwritten while a backward may need them, and are the same for two passes and for a second
    backward."""
    x, y = torch.randn(6, 33), torch.randn(6, 33)
    changed, expected = optimized("mxfp8"), []
    changed(x).sum().backward()
    expected = [p.grad.clone() for p in changed.parameters()]
    model = optimized("mxfp8")
    with dw.accumulate(model):
        first = model(x).sum()
        (before,) = blocks(model)
        with torch.no_grad():
            model.c.weight.add_(1.0)  # c's backward reads its codes alone
        second = model(y).sum()
        (after,) = blocks(model)
        assert before is not after and before.users == after.users == 1
        third = model(y).sum()
        assert blocks(model) == [after] and after.users == 2
        first.backward(retain_graph=True)
        assert_same([p.grad for p in model.parameters()], expected)
        first.backward()
        assert_same([p.grad for p in model.parameters()], [2 * grad for grad in expected])
        model.zero_grad()
        second.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
    third.backward()  # behind the context
    assert_same([p.grad for p in model.parameters()], grads)
    assert before.users == after.users == 0


class Chain(torch.nn.Sequential):
    def __init__(self) -> None:
        layers = [[torch.nn.Linear(96, 96), torch.nn.Tanh()] for _ in range(8)]
        super().__init__(*sum(layers, []))


@pytest.mark.parametrize("updates", [False, True], ids=["", "updates in backward"])
def test_backward_in_parts(updates, monkeypatch):
    """Segments of the arena are freed between parts, and so may hooks update the parameters, whose codes later parts
    still read."""
    monkeypatch.setattr(Target, "arena_segments", 4)
    monkeypatch.setattr(Target, "part_bytes", lambda self: 1)
    results = []

    def update(parameter) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.5)

    for once in (False, True):
        torch.manual_seed(0)
        model = dw.optimize(Chain(), precision=policy("mxfp8"), verbose=False)
        for parameter in model.parameters() if updates else ():
            parameter.register_post_accumulate_grad_hook(update)
        losses = []
        for _ in range(2):
            with dw.accumulate(model) if once else contextlib.nullcontext():
                for _ in range(3):
                    loss = model(torch.randn(61, 96)).square().mean()
                    loss.backward()
                    losses.append(loss.detach())
        results.append([*losses, *[p.grad for p in model.parameters()], *model.parameters()])
    assert_same(*results)
    (plan,) = kept_plans(model)
    assert plan.part_count > 1 and len(plan.segments) > 1
    plan.profile(True)
    for _ in range(2):
        with dw.accumulate(model):
            for _ in range(3):
                model(torch.randn(61, 96)).square().mean().backward()
    assert runs(plan) == (({6} if updates else {2}), {6})


def test_memory_of_earlier_steps_is_used_again():
    model = optimized("mxfp8")
    train(model, True)
    (block,) = blocks(model)
    train(model, True)
    assert blocks(model) == [block]
    frozen = model.a.weight.requires_grad_(False)  # another engine, with codes of the same size
    train(model, True)
    assert blocks(model) == [block] and frozen.grad is None
    assert len(kept_plans(model)) == 4
    copied = copy.deepcopy(model)
    assert not blocks(copied)
    assert_same(train(copied, True), train(model, True))


def test_nested_contexts_and_errors():
    model = optimized("fp8")
    x = torch.randn(5, 33)
    with pytest.raises(ZeroDivisionError):
        with dw.accumulate(model), dw.accumulate(model):
            model(x).sum().backward()
            raise ZeroDivisionError
    (session,) = sessions(model)
    assert not session.kept.wanted
    model.zero_grad()
    model(x).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with dw.accumulate(model):
        model(x).sum().backward()
    assert_same([p.grad for p in model.parameters()], grads)


def test_the_guides_code():
    guide = (Path(__file__).parents[2] / "docs" / "precision.md").read_text()
    (text,) = [
        text
        for text in re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
        if "accumulate(" in text
    ]

    class Model(Layers):
        def forward(self, x):
            return SequenceClassifierOutput(loss=super().forward(x).square().mean())

    model = dw.optimize(Model(), precision="mxfp8", verbose=False)
    batches = [{"x": torch.randn(6, 33)} for _ in range(2)]
    optimizer = dw.AdamW(model.parameters())
    exec(text, {"deepwell": dw, "model": model, "optimizer": optimizer, "steps": [batches] * 2})
    assert len(kept_plans(model)) == 1


# ---- Trainer -------------------------------------------------------------------------------------------


class Rows(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(96, 33, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i]}


def trainer(precision, once: bool, **options) -> dw.Trainer:
    torch.manual_seed(0)
    run = dw.Trainer(
        Layers(), Rows(), batch=4, accumulate=3, steps=6, lr=1e-2, shuffle=False, progress=False, precision=precision,
        loss_fn=lambda model, batch: model(batch["x"]).square().mean(), quantize_once=once, **options,
    )  # fmt: skip
    torch.manual_seed(9)
    return run


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_trainer(recipe):
    """A guard samples every second step by a plan of its own, and a layer falls back; then the run is repaired."""
    guard = dw.PrecisionGuard(every=2, snr_db=60.0, samples=1, repair=0.2)
    results = []
    for once in (False, True):
        run = trainer(policy(recipe, guard=guard), once)
        run.fit()
        results.append((run.last_report.loss, run.precision_changes, run.precision_report(), run))
    assert results[0][:3] == results[1][:3] and len(results[0][1]) > 1
    assert_same(list(results[0][3].model.parameters()), list(results[1][3].model.parameters()))


def test_trainer_counts():
    run = trainer("mxfp8", True)
    run.fit(steps=1)
    (plan,) = kept_plans(run.model)
    plan.profile(True)
    run.fit(steps=6)
    assert runs(plan) == ({5}, {15})
    one = trainer("mxfp8", False)
    one.fit(steps=1)
    assert not kept_plans(one.model)


# ---- memory --------------------------------------------------------------------------------------------


def test_the_dry_run_counts_the_codes():
    """Values of MXFP8 in BF16, as a CPU computes with them, along one axis for forward and the other for backward. The
    first layer's input needs no gradient."""
    model, x = Layers(), torch.randn(12, 33)
    codes = sum(
        -(-2 * weight.numel() * times // 64) * 64  # each is a multiple of 64 bytes
        for weight, times in ((model.a.weight, 1), *2 * [(model.b.weight, 1), (model.c.weight, 1)])
    )
    options = dict(precision=policy("mxfp8"), optimizer=None)
    with_codes = dw.dryrun(model, x, accumulate=True, **options)
    without = dw.dryrun(model, x, accumulate=True, quantize_once=False, **options)
    assert with_codes["arena"]["kept_bytes"] == codes and without["arena"]["kept_bytes"] == 0
    assert all(alive >= codes for alive in with_codes["arena"]["alive"])
    update = [report["moments"][-1]["arena"] for report in (with_codes, without)]
    assert update[0] >= codes and with_codes["peak_bytes"] > without["peak_bytes"]
    assert dw.dryrun(model, x, **options)["arena"]["kept_bytes"] == 0
    optimized_model = optimized("mxfp8")
    train(optimized_model, True, rows=(12, 12, 12))
    assert blocks(optimized_model)[0].segment.bytes == codes


def test_the_dry_run_of_a_gpu_counts_the_codes():
    model = Layers((64, 96, 32)).bfloat16()
    options = dict(precision=policy("fp8"), optimizer=None, target="sm_90a")
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with_codes = dw.dryrun(model, x, accumulate=True, **options)
    without = dw.dryrun(model, x, accumulate=True, quantize_once=False, **options)
    # FP8 codes of a in one orientation, of b and c in both, and three scales, each a multiple of 256 bytes.
    codes = 96 * 64 + 2 * 96 * 96 + 2 * 96 * 32 + 3 * 256
    assert with_codes["arena"]["kept_bytes"] == codes and without["arena"]["kept_bytes"] == 0
    assert with_codes["moments"][-1]["arena"] >= codes
