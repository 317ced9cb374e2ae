"""Guards of low precision: statistics of operands against NumPy in FP64, layers that fall back to BF16, the repair, loss
spikes, and runs that resume in the middle of them."""

import json
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import deepwell as dw
import numpy as np
import pytest
import torch
from compilers import needs_compiler
from deepwell import optim
from deepwell.optimize import sessions
from deepwell.precision import OPERANDS
from test_precision import blocked, e4m3, operand, policy_with_rule, rotated
from torch.utils.data import DataLoader, Dataset
from train_runs import read_log
from transformers.modeling_outputs import SequenceClassifierOutput

pytestmark = pytest.mark.usefixtures("always")

# ---- statistics ----------------------------------------------------------------------------------


def guarded(recipe: str, **guard) -> dw.PrecisionPolicy:
    """Returns a policy of every layer; "mxfp8+floor" is MXFP8 with that rule for scales."""
    name, _, rule = recipe.partition("+")
    scaling = dw.MicroscalingConfig(32, rule) if rule else None
    return dw.PrecisionPolicy(
        name, [], scaling, bf16_share=0.0, guard=dw.PrecisionGuard(**guard) if guard is not None else None
    )  # fmt: skip


def test_the_helper_makes_the_policies_of_the_recipes():
    """The rules below are those of test_precision.py, whose policies have the same operands."""
    for recipe in ("mxfp8", "mxfp8+floor", "fp8"):
        expected = policy_with_rule(recipe)
        if isinstance(expected, str):
            expected = dw.PrecisionPolicy(expected, [])
        assert guarded(recipe, every=0) == expected


def rotates(recipe: str, index: int) -> bool:
    return recipe == "nvfp4" and index >= 4 or recipe == "mxfp4" and index >= 2


def saturation(recipe, given, is_weight):
    """Returns the magnitude from which rounding alone exceeds the largest number of each element's block, which is that
    number and half of the step below it; None for scales with which that never happens."""
    if recipe == "mxfp8+floor":  # E4M3 to 448, and a scale of 2^(floor(log2(amax)) - 8)
        amax = np.abs(blocked(given, 32)).max(-1)
        with np.errstate(divide="ignore"):
            scale = np.exp2(np.maximum(np.floor(np.log2(amax)) - 8, -127))
        return np.repeat(464.0 * scale, 32, axis=1)[:, : given.shape[1]]
    if recipe != "nvfp4":
        return None
    # E2M1 to 6. A scale of a small block may be rounded down by up to a half, because E4M3 has few bits there.
    f32 = np.float32
    tensor = f32(np.abs(given).max() / f32(448 * 6))
    amax = np.abs(blocked(given, 16)).max(-1)
    if is_weight:  # one scale for 16 x 16
        tall = np.pad(amax, ((0, -len(amax) % 16), (0, 0))).reshape(-1, 16, amax.shape[1]).max(1)
        amax = np.repeat(tall, 16, axis=0)[: len(amax)]
    scale = e4m3(np.minimum(amax.astype(f32) / f32(6) / tensor, f32(448)))
    return np.repeat(7.0 * scale * float(tensor), 16, axis=1)[:, : given.shape[1]]


def expected_statistics(recipe, x, w, dy, seed):
    """Returns signal, noise, elements other than 0, those that became 0, and saturated ones, for each operand as rows
    along the axis that its matmul sums over."""

    def turned(t):
        return np.ascontiguousarray(t.T)

    rows = [
        (x, operand(x, recipe, "activation")),
        (w, operand(w, recipe, "weight")),
        (dy, operand(dy, recipe, "gradient", random=(seed, 0))),
        (turned(w), operand(turned(w), recipe, "weight backward")),
        (turned(dy), operand(turned(dy), recipe, "gradient", columns=True, random=(seed, 1))),
        (turned(x), operand(turned(x), recipe, "activation", columns=True)),
    ]
    found = []
    for index, (given, (values, scale)) in enumerate(rows):
        if rotates(recipe, index):
            given = rotated(given)
        given = given.astype(np.float64)
        q = values * float(np.float32(scale))
        if recipe == "fp8-block":
            q = q.astype(np.float32).astype(np.float64)  # code * scale, which the statistics round
        limit = saturation(recipe, given, index in (1, 3))
        saturated = 0 if limit is None else ((np.abs(given) > limit) & (q != 0)).sum()
        found.append(
            (
                (given**2).sum(), ((given - q) ** 2).sum(), (given != 0).sum(),
                ((given != 0) & (q == 0)).sum(), saturated,
            )
        )  # fmt: skip
    return np.array(found, np.float64)


def random_values(kind: str, *shape: int) -> torch.Tensor:
    x = torch.randn(*shape)
    if kind == "mixed":  # magnitudes over many binades, and zeros
        x = x * torch.exp2(torch.randint(-18, 9, shape).float())
        x[: shape[0] // 3] = 0
    return x


def sampled(model, x, dy) -> np.ndarray:
    """Returns the statistics of one step."""
    with dw.sample_precision(model) as sample:
        torch.manual_seed(77)
        model(x).backward(dy)
    (layer,) = sample.layers
    assert list(layer["bounds"]) == list(OPERANDS)
    return sample.numbers()[0].numpy()


@pytest.mark.parametrize("kind", ["normal", "mixed"])
@pytest.mark.parametrize(
    "recipe", ["fp8", "fp8-block", "mxfp8", "mxfp8+floor", "mxfp6", "mxfp4", "nvfp4"]
)
def test_statistics_against_fp64(recipe, kind):
    """Counts are exact. Sums of n squares in F64 in any order agree to n 2^-53."""
    torch.manual_seed(5)
    model = torch.nn.Linear(67, 35)
    dw.optimize(model, precision=guarded(recipe), verbose=False)
    with torch.no_grad():
        model.weight.copy_(random_values(kind, 35, 67))
    x, dy = random_values(kind, 41, 67).requires_grad_(), random_values(kind, 41, 35)
    torch.manual_seed(77)
    seed = [int(word) for word in torch.empty(2, dtype=torch.int64).random_()]
    wanted = expected_statistics(
        recipe, x.detach().numpy(), model.weight.detach().numpy().copy(), dy.numpy(), seed
    )
    got = sampled(model, x, dy)
    assert np.array_equal(got[:, 2:], wanted[:, 2:])
    np.testing.assert_allclose(got[:, :2], wanted[:, :2], rtol=41 * 67 * 2.0**-53)
    if kind == "mixed" and recipe != "fp8":
        assert got[:, 3].all()  # the case would otherwise not show what is counted
    if recipe == "mxfp8+floor" or (recipe, kind) == ("nvfp4", "mixed"):
        assert got[:, 4].any()


def test_observing_changes_no_gradient_and_adds_up():
    """A sampled step has the bits of any other; the statistics of two micro-batches are added."""
    results = []
    for observed in (False, True):
        torch.manual_seed(5)
        model = dw.optimize(torch.nn.Linear(40, 24), precision=guarded("nvfp4"), verbose=False)
        x, dy = torch.randn(2, 33, 40), torch.randn(2, 33, 24)
        sample = None
        for k in range(2):
            torch.manual_seed(k)
            if observed:
                with dw.sample_precision(model) as one:
                    sample = sample or one
                    for session in sessions(model):
                        session.sample = sample
                    model(x[k]).backward(dy[k])
            else:
                model(x[k]).backward(dy[k])
        results.append([each.grad.clone() for each in model.parameters()])
        (forward,) = (each.forward for each in [model])
        programs = [each for each in forward.programs()]
        operations = [
            each["op"]
            for program in programs
            for plan in program.plans()
            for each in json.loads(plan.operations())
        ]
        assert operations.count("quantization_error") == 0  # other steps have no node of it
    assert all(map(torch.equal, *results))
    signal = sample.numbers()[0, 0, 0].item()
    assert signal == pytest.approx(float((x.double() ** 2).sum()), rel=1e-12)


def test_kinds_of_calls_share_a_layer():
    """A batch of one row is captured by itself; the layer's statistics are those of both calls. So ranks whose batches
    differ have statistics of the same shape."""
    torch.manual_seed(5)
    model = dw.optimize(torch.nn.Linear(40, 24), precision=guarded("mxfp8"), verbose=False)
    calls = [(torch.randn(rows, 40), torch.randn(rows, 24)) for rows in (1, 33)]
    separate = [sampled(model, x, dy) for x, dy in calls]
    with dw.sample_precision(model) as sample:
        for x, dy in calls:
            model(x).backward(dy)
    assert len(sample._made) == 2 and len(sample.layers) == 1
    assert np.allclose(sample.numbers()[0].numpy(), sum(separate), rtol=1e-12)


def test_bounds_follow_from_the_format():
    """Numbers of a normal distribution are 6 dB above the bound; blocks lose up to 2.5 dB of that, or gain up to 1."""
    torch.manual_seed(0)
    for recipe in ("fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4"):
        model = dw.optimize(torch.nn.Linear(256, 192), precision=guarded(recipe), verbose=False)
        torch.nn.init.normal_(model.weight)
        with dw.sample_precision(model) as sample:
            model(torch.randn(160, 256).requires_grad_()).backward(torch.randn(160, 192))
        report = sample.report()
        assert [each.operand for each in report] == list(OPERANDS)
        for each in report:
            assert 3.5 < each.snr_db - each.bound_db < 7.0, each
            assert each.underflow <= 0.9 * each.elements > 0


@needs_compiler
@pytest.mark.parametrize(
    "recipe,dtype", [("fp8", torch.bfloat16), ("mxfp4", torch.float32)], ids=str
)
def test_an_emulated_gpu_finds_the_same_numbers(recipe, dtype):
    found = []
    for target in ("cpu", "emulator:sm_90a"):
        torch.manual_seed(0)
        model = torch.nn.Linear(72, 40).to(dtype)
        dw.optimize(model, precision=guarded(recipe), target=target, verbose=False)
        x, dy = torch.randn(17, 72, dtype=dtype), torch.randn(17, 40, dtype=dtype)
        found.append(sampled(model, x.requires_grad_(), dy))
    assert np.array_equal(found[0][:, 2:], found[1][:, 2:])
    np.testing.assert_allclose(found[0], found[1], rtol=17 * 72 * 2.0**-53)


# ---- runs ----------------------------------------------------------------------------------------


class Small(torch.nn.Module):
    """Three layers; one element of the second layer's weight is so large that FP8 leaves nothing of the others."""

    def __init__(self, outlier: float = 0.0) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 48)
        self.middle = torch.nn.Linear(48, 48)
        self.last = torch.nn.Linear(48, 4)
        if outlier:
            with torch.no_grad():
                self.middle.weight[3, 5] = outlier
                self.first.weight[5] = 0.0  # so that nothing is multiplied by it
                self.first.bias[5] = 0.0

    def forward(self, x, y):
        h = torch.tanh(self.middle(torch.relu(self.first(x))))
        return {"loss": torch.nn.functional.mse_loss(self.last(h), y)}


def small(outlier: float = 0.0) -> Small:
    torch.manual_seed(3)
    return Small(outlier)


class Rows(Dataset):
    """Rows; those of the batches (of 4) in ``spikes`` have targets that are far away."""

    def __init__(self, spikes=(), factor: float = 30.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(96, 32, generator=generator)
        self.y = torch.randn(96, 4, generator=generator)
        for step in spikes:
            self.y[4 * (step - 1) : 4 * step] *= factor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


def trainer(model, folder: Path, policy=None, data=None, **options) -> dw.Trainer:
    options = {
        "lr": 1e-3,
        "steps": 12,
        "progress": False,
        "schedule": "constant",
        "weight_decay": 0.0,
        **options,
    }
    data = Rows() if data is None else data
    torch.manual_seed(9)
    return dw.Trainer(
        model, data, batch=4, shuffle=False, precision=policy, checkpoint=folder / "ck", log=folder / "log.jsonl",
        **options,
    )  # fmt: skip


def manifest(folder: Path, step: int) -> dict:
    return json.loads((folder / "ck" / f"step-{step:012}" / "manifest.json").read_text())


def plain(line: dict) -> dict:
    return {key: value for key, value in line.items() if key != "tokens_per_second"}


def test_a_layer_with_an_outlier_falls_back(tmp_path, capsys):
    policy = guarded("fp8", every=2)
    told: list[dict] = []
    callback = types.SimpleNamespace(on_precision=lambda trainer, change: told.append(change))
    run = trainer(small(1e7), tmp_path, policy, progress=True, callbacks=[callback])
    run.fit()
    (change,) = run.precision_changes
    assert told == [change]
    assert change["layer"] == "middle" and change["operand"] in ("forward_w", "dgrad_w")
    # Steps 2 and 4 failed, so the step after the next one is the first in BF16.
    assert change["sampled_step"] == 4 and change["from_step"] == 6
    assert change["underflow"] > 0.99 and "became 0, bound 90%" in change["reason"]
    line = "step 4  middle falls back to BF16 from step 6 on"
    assert line in capsys.readouterr().out
    lines = read_log(tmp_path / "log.jsonl")
    assert [each["precision_change"] for each in lines if "precision_change" in each] == [change]
    sampled = [each for each in lines if "snr_db" in each]
    assert [each["step"] for each in sampled] == [2, 4, 6, 8, 10, 12]
    # From step 6 on "middle" is not quantized, and the layer that is worst is another one.
    assert all(each["underflow"] > 2000 for each in sampled[:2])
    assert all(each["underflow"] < 100 for each in sampled[2:])
    assert {each.layer for each in run.precision_report()} == {"first", "last"}
    found = manifest(tmp_path, 12)
    assert found["precision_changes"] == [change]
    kept = dw.PrecisionPolicy.load(tmp_path / "ck" / "step-000000000012" / "precision.json")
    assert kept.fallen_back == ("middle",) and kept.guard == policy.guard
    assert kept == policy.with_fallen_back(["middle"])
    table = kept.table(small(), {"x": torch.randn(4, 32), "y": torch.randn(4, 4)})
    assert "fell back to BF16 by the guard" in table
    assert "1 in BF16" in dw.summary(run.model)


def test_a_low_signal_to_noise_ratio_falls_back(tmp_path):
    """A bound that no operand of E5M2 reaches, with one failed sample."""
    policy = guarded("fp8", every=3, snr_db=28.0, samples=1)
    run = trainer(small(), tmp_path, policy, steps=6)
    run.fit()
    assert {each["layer"] for each in run.precision_changes} == {"first", "middle", "last"}
    for change in run.precision_changes:
        assert change["scheme"] == "fp8-tensor-e5m2" and 22 < change["snr_db"] < 28
        assert change["bound_db"] == 28 and change["from_step"] == 5
    assert run.precision_report() and not [
        line for line in read_log(tmp_path / "log.jsonl") if line["step"] == 6 and "snr_db" in line
    ]


@pytest.mark.parametrize("stop", [3, 4, 5, 9])
def test_a_run_resumes_around_a_fallback_and_the_repair(stop, tmp_path):
    """Between the failed samples, before the fallback begins, after it, and in front of the repair."""
    policy = guarded("fp8", every=2, repair=0.25)  # repairs from step 10 on
    (tmp_path / "whole").mkdir(), (tmp_path / "cut").mkdir()
    runs = {}
    for name in ("whole", "cut"):
        run = trainer(small(1e7), tmp_path / name, policy, save_every=1, keep=20)
        if name == "cut":
            stops = types.SimpleNamespace(
                on_step=lambda trainer, report: report.step == stop and trainer.stop()
            )
            run.callbacks.append(stops)
            assert run.fit().steps == stop
            run = trainer(small(), tmp_path / name, policy, resume=True, save_every=1, keep=20)
        run.fit()
        runs[name] = run
    lines = [list(map(plain, read_log(tmp_path / name / "log.jsonl"))) for name in runs]
    assert lines[0] == lines[1]
    assert runs["whole"].precision_changes == runs["cut"].precision_changes
    assert [each["from_step"] for each in runs["cut"].precision_changes] == [6, 10]
    for ours, theirs in zip(runs["whole"].model.parameters(), runs["cut"].model.parameters()):
        assert torch.equal(ours, theirs)


def on_ranks(folder: Path, kind: str) -> list[dict]:
    words = [sys.executable, Path(__file__).with_name("guard_ranks.py"), folder, kind]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout, done.stderr[-3000:])
    return json.loads(done.stdout)


def test_a_rank_without_an_engine_takes_part(tmp_path):
    """PyTorch runs the model of one rank, which observes nothing. It adds zeros, and falls back with the other."""
    ours, theirs = on_ranks(tmp_path, "pytorch")
    assert ours["programs"] and not theirs["programs"]
    assert ours["changes"] == theirs["changes"] and ours["elements"] == theirs["elements"]
    (change,) = ours["changes"]
    assert (change["layer"], change["sampled_step"], change["from_step"]) == ("middle", 4, 6)
    # The rank with an engine reads all of a weight and half of the rows, in each of two micro-batches.
    assert ours["elements"]["last forward_w"] == 2 * 48 * 4
    assert ours["elements"]["first forward_x"] == 2 * 2 * 32


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ranks_agree(kind, tmp_path):
    """Two ranks fall back in the same step, by the statistics of both."""
    ours, theirs = on_ranks(tmp_path, kind)
    assert ours == theirs and ours["programs"]
    (change,) = ours["changes"]
    assert (change["layer"], change["sampled_step"], change["from_step"]) == ("middle", 4, 6)
    # Each rank reads all of a weight and half of the rows, in each of two micro-batches.
    assert ours["elements"]["last forward_w"] == 2 * 2 * 48 * 4
    assert ours["elements"]["first forward_x"] == 2 * 4 * 32
    # The micro-batches of a step share the codes, but not where the weights are sharded.
    assert (ours["kept"] > 0) == (kind == "ddp")


def test_the_last_steps_are_repaired_in_bf16(tmp_path):
    policy = guarded("mxfp4", every=0, repair=0.25)
    run = trainer(small(), tmp_path, policy, steps=8, save_every=1, keep=9)
    run.fit()
    assert run.precision_changes == [{"from_step": 7, "repair": True}]
    assert manifest(tmp_path, 8)["precision_changes"] == run.precision_changes
    assert "precision_changes" not in manifest(tmp_path, 6)
    lines = {line["step"]: line for line in read_log(tmp_path / "log.jsonl") if "loss" in line}
    # The losses of steps 6 and 7 from their checkpoints, in MXFP4 and in BF16.
    losses = {}
    for step in (6, 7):
        for name in ("mxfp4", "bf16"):
            model = dw.optimize(small(), precision=guarded(name, every=0), verbose=False)
            found = dw.Trainer(model, Rows(), batch=4, optimize=False, steps=1, progress=False)
            path = tmp_path / "ck" / f"step-{step - 1:012}" / "model.safetensors"
            from deepwell.training import state

            state.read_into(str(path), state.tensors_of(found.module))
            batch = {key: value[4 * (step - 1) : 4 * step] for key, value in vars(Rows()).items()}
            losses[step, name] = float(model(**batch)["loss"].detach())
    assert lines[6]["loss"] == losses[6, "mxfp4"] != losses[6, "bf16"]
    assert lines[7]["loss"] == losses[7, "bf16"] != losses[7, "mxfp4"]


@needs_compiler
def test_samples_are_read_behind_the_gpu(tmp_path, monkeypatch):
    """On a GPU a sampled step is waited for no more than others: the next one is queued before it is read, and nothing
    looks at the statistics in between. The run is that of one that waits for each step."""
    monkeypatch.setattr(optim, "emulated", "emulator:sm_90a")
    behind: dict[int, int] = {}
    judge = dw.Trainer._report_of

    def watched(trainer, queued, **named):
        behind[queued.step] = trainer.step - queued.step
        return judge(trainer, queued, **named)

    monkeypatch.setattr(dw.Trainer, "_report_of", watched)
    runs = []
    for name, callbacks in (
        ("queued", []),
        ("waits", [types.SimpleNamespace(on_step=lambda *_: 0)]),
    ):
        (tmp_path / name).mkdir()
        behind.clear()
        run = trainer(
            small(1e7),
            tmp_path / name,
            guarded("fp8", every=2),
            callbacks=callbacks,
            spike_factor=50.0,
        )
        run.fit()
        assert behind == {step: int(name == "queued" and step < 12) for step in range(1, 13)}
        assert [each["from_step"] for each in run.precision_changes] == [6]
        lines = sorted(map(plain, read_log(tmp_path / name / "log.jsonl")), key=json.dumps)
        runs.append((lines, [each.detach().clone() for each in run.model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


def test_a_guard_needs_an_engine(tmp_path):
    with pytest.raises(dw.UnsupportedError, match="precision has a guard, and Deepwell's engine"):
        trainer(small(), tmp_path, guarded("fp8", every=2), optimize=False)
    with pytest.raises(ValueError, match="no precision policy with a guard"):
        with dw.sample_precision(small()):
            pass


def test_an_optimized_model_keeps_its_policy(tmp_path):
    policy = guarded("fp8", every=2)
    model = dw.optimize(small(1e7), precision=policy, verbose=False)
    run = trainer(model, tmp_path, steps=4)
    run.fit()
    assert run.precision == policy and [each["layer"] for each in run.precision_changes] == [
        "middle"
    ]


def test_an_optimized_model_keeps_its_target():
    """A GPU's kernels that "auto" never chooses stay, with the policy; a precision that is given begins anew."""
    policy = guarded("fp8", every=2)
    for target, precision, expected in (
        ("emulator:sm_90a", None, "emulator:sm_90a"),
        ("emulator:sm_90a", "mxfp8", "cpu"),
        ("auto", None, "cpu"),
    ):
        model = dw.optimize(small(), precision=policy, target=target, verbose=False)
        dw.Trainer(model, Rows(), batch=4, steps=1, progress=False, precision=precision)
        (session,) = sessions(model)
        assert session.target.name == expected
        assert (session.policy == policy) == (precision is None)


class Parts(torch.nn.Module):
    """Two modules whose layers have the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Sequential(
            torch.nn.Linear(32, 48), torch.nn.Tanh(), torch.nn.Linear(48, 48)
        )
        self.two = torch.nn.Sequential(
            torch.nn.Linear(48, 48), torch.nn.Tanh(), torch.nn.Linear(48, 4)
        )

    def forward(self, x, y):
        return {"loss": torch.nn.functional.mse_loss(self.two(self.one(x)), y)}


def in_parts(*policies) -> Parts:
    torch.manual_seed(3)
    model = Parts()
    for part, policy in zip((model.one, model.two), policies):
        dw.optimize(part, precision=policy, verbose=False)
    return model


def test_a_policy_of_a_part_is_of_that_part(tmp_path):
    """Its names are relative to the module that was optimized with it. A layer that falls back there leaves the layer of the
    same name in another part, and that part's policy, as they are."""
    guarded_one = dw.PrecisionPolicy(
        "fp8", [], layers={"0": "bf16"}, guard=dw.PrecisionGuard(every=1, snr_db=28.0, samples=1)
    )
    other = dw.PrecisionPolicy("mxfp8", [])
    model = in_parts(guarded_one, other)
    run = trainer(model, tmp_path, steps=4)
    run.fit()
    (change,) = run.precision_changes
    assert (change["layer"], change["from_step"]) == ("2", 3)
    assert len(sessions(model)) == 2
    policies = {session.policy.default_compute: session.policy for session in sessions(model)}
    assert policies[dw.Precision.FP8].fallen_back == ("2",)
    assert policies[dw.Precision.MXFP8] is other


def test_guards_of_several_parts_are_refused(tmp_path):
    model = in_parts(guarded("fp8", every=2), guarded("mxfp8", every=2))
    with pytest.raises(dw.UnsupportedError, match="2 modules were optimized by themselves"):
        trainer(model, tmp_path)


def test_the_guides_code(tmp_path, monkeypatch, capsys):
    """docs/precision.md: a run with a guard, and a sample in a loop of the user's own."""
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[2] / "docs" / "precision.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    run, sample = [text for text in blocks if "Guard(" in text or "sample_precision(" in text]

    class Model(Small):
        def forward(self, x, y):
            return SequenceClassifierOutput(loss=super().forward(x, y)["loss"])

    scope = {"deepwell": dw, "model": Model(), "loader": DataLoader(Rows(), batch_size=4)}
    exec(run.replace("steps=1000", "steps=105, progress=False"), scope)
    assert len(scope["trainer"].precision_report()) == 16 and not scope["trainer"].spikes
    assert scope["trainer"].precision_changes == [{"from_step": 101, "repair": True}]
    scope["model"] = dw.optimize(Model(), precision=scope["policy"], verbose=False)
    exec(sample, {**scope, "batch": next(iter(scope["loader"]))})
    assert "25.56" in capsys.readouterr().out


# ---- the policy's text -----------------------------------------------------------------------------


def test_the_guard_in_a_policy(tmp_path):
    guard = dw.PrecisionGuard(every=50, snr_db=20.0, underflow=0.5, samples=3, repair=0.05)
    policy = dw.PrecisionPolicy("mxfp8", guard=guard)
    assert policy.guard == guard and f"guard={guard}" in repr(policy)
    policy.save(tmp_path / "policy.json")
    assert dw.PrecisionPolicy.load(tmp_path / "policy.json") == policy
    assert policy != dw.PrecisionPolicy("mxfp8") and dw.PrecisionPolicy("mxfp8").guard is None
    assert "every 50 steps" in str(policy) and "20 dB" in str(policy) and "last 5%" in str(policy)
    fallen = policy.with_fallen_back(["h.0", "h.1"]).with_fallen_back(["h.1", "h.2"])
    assert fallen.fallen_back == ("h.0", "h.1", "h.2") and "h.2" in str(fallen)
    assert dw.PrecisionPolicy.from_json(fallen.to_json()) == fallen
    mixed = dw.PrecisionPolicy("nvfp4", ["head"], layers={"*.a": "fp8", "*.b": "fp32"}, guard=guard)
    repaired = mixed.in_bf16()
    assert repaired.default_compute is dw.Precision.BF16 and repaired.guard is None
    assert repaired.layers == {"*.a": dw.Precision.BF16}
    assert repaired.sensitive_layers == mixed.sensitive_layers and not repaired.bf16_share


@pytest.mark.parametrize(
    "guard,message",
    [
        ({"every": -1}, "every is -1; expected"),
        ({"snr_db": 300}, "snr_db is 300; expected"),
        ({"underflow": 1.5}, "underflow is 1.5; expected"),
        ({"samples": 0}, "samples is 0; expected"),
        ({"repair": 2}, "repair is 2; expected"),
        ({"every": "often"}, "every is a string"),
    ],
    ids=str,
)
def test_mistakes_in_a_guard(guard, message):
    with pytest.raises(ValueError, match=message):
        dw.PrecisionPolicy("fp8", guard=dw.PrecisionGuard(**guard))


def test_a_fallen_layer_does_not_change_the_share_in_bf16():
    """Of five layers the last one is BF16 by the share; a layer in front that falls back changes nothing for it."""
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(5)])
    policy = dw.PrecisionPolicy("fp8", [], bf16_share=0.2, guard=dw.PrecisionGuard())
    lines = policy.with_fallen_back(["1"]).table(model, torch.randn(3, 8)).splitlines()[1:]
    why = [line.split(None, 7)[7] for line in lines]
    assert why[1] == "fell back to BF16 by the guard" and why[4] == "among the last, which are BF16"
    assert [why[k] for k in (0, 2, 3)] == ["the default"] * 3


# ---- loss spikes -----------------------------------------------------------------------------------


def spiky(folder: Path, spikes, **options) -> dw.Trainer:
    options = {"optimize": False, "spike_factor": 3.0, "spike_window": 8, "steps": 20, **options}
    return trainer(small(), folder, None, Rows(spikes), **options)


def test_a_loss_spike_is_skipped(tmp_path, capsys):
    run = spiky(tmp_path, [14], progress=True)
    before = {}

    def on_step(trainer, report):
        now = trainer.module.first.weight.detach().clone()
        if report.step == 14:
            assert report.is_spike and torch.equal(now, before["weight"])
            assert report.loss > report.spike_limit and not report.not_finite
        before["weight"] = now

    run.callbacks.append(types.SimpleNamespace(on_step=on_step))
    run.fit()
    assert run.spikes == 1 and run.updates == 19
    lines = read_log(tmp_path / "log.jsonl")
    assert [line["applied"] for line in lines] == [step != 14 for step in range(1, 21)]
    assert lines[13]["loss"] > lines[13]["spike_limit"]
    # The limit leaves out the step before.
    known = [line["loss"] for line in lines[4:12]]
    assert lines[13]["spike_limit"] == pytest.approx(3.0 * math.fsum(known) / 8, rel=1e-12)
    assert "step 14 was not applied: its loss is a spike, above" in capsys.readouterr().out


def test_spikes_in_a_row_go_back(tmp_path):
    run = spiky(tmp_path, [12, 13, 14], max_bad_steps=3, save_every=5)
    backs = []
    run.callbacks.append(
        types.SimpleNamespace(on_rollback=lambda trainer, step: backs.append((trainer.step, step)))
    )
    run.fit()
    assert backs == [(14, 10)] and run.spikes == 3 and run.updates == 20 - 4
    with pytest.raises(
        dw.DivergenceError, match="2 steps in a row up to step 13 bad .*spike, above"
    ):
        (tmp_path / "alone").mkdir()
        spiky(tmp_path / "alone", [12, 13, 14], max_bad_steps=2).fit()


def test_a_run_resumes_before_a_spike(tmp_path):
    (tmp_path / "whole").mkdir(), (tmp_path / "cut").mkdir()
    for name in ("whole", "cut"):
        run = spiky(tmp_path / name, [14])
        if name == "cut":
            run.fit(13)
            run = spiky(tmp_path / name, [14], resume=True)
        run.fit(20)
    found = [list(map(plain, read_log(tmp_path / each / "log.jsonl"))) for each in ("whole", "cut")]
    assert found[0] == found[1] and not found[0][13]["applied"]


def test_a_run_without_a_limit_drops_the_losses(tmp_path):
    """Losses of steps long ago would otherwise make a limit when a later run has one again."""
    spiky(tmp_path, []).fit(10)
    assert len(manifest(tmp_path, 10)["losses"]) == 9
    spiky(tmp_path, [], spike_factor=None, resume=True).fit(14)
    assert "losses" not in manifest(tmp_path, 14)


@pytest.mark.parametrize(
    "options,message",
    [({"spike_factor": 0.9}, "spike_factor is 0.9"), ({"spike_window": 0}, "spike_window is 0")],
    ids=str,
)
def test_mistakes_in_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        spiky(tmp_path, [], **options)
