"""deepwell.dryrun for a GPU: the predicted peak of a step is that of all tensors and arenas of the step that an emulated
GPU runs, to the byte. tests/gpu/test_dryrun.py compares it with PyTorch's counters on a GPU."""

from __future__ import annotations

import deepwell as dw
import pytest
import torch
from deepwell import _deepwell, gpu_memory, optim
from deepwell.errors import UnsupportedError
from step_memory_models import MODELS
from tensor_memory import counted_peaks, shadow_arenas
from test_optimize_gpu import Wide
from torch import nn
from users import engine_calls
from zoo import gpt2, language_model_arguments
from zoo_families import VARIANTS

EMULATED = "emulator:sm_90a"
FAMILIES = {v.family: v for v in VARIANTS if v.name == "plain"}


@pytest.fixture(autouse=True)
def _counted(monkeypatch) -> None:
    if not _deepwell.jit_compiler():
        pytest.skip("elementwise programs need NVRTC")
    monkeypatch.setenv("DEEPWELL_FIRST_USE_CHECK", "off")  # test_attention_first_use runs them
    monkeypatch.setattr(optim, "emulated", EMULATED)
    shadow_arenas(monkeypatch)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw_dw":
        return dw.AdamW(model.parameters())
    fused = name == "adamw_fused"
    return torch.optim.AdamW(model.parameters(), fused=fused, foreach=not fused)


class Call:
    """A model, and the arguments of its call."""

    def __init__(self, build, arguments, dtype: torch.dtype = torch.float32) -> None:
        self.build, self.arguments, self.dtype = build, arguments, dtype

    @classmethod
    def of(cls, name: str, dtype: torch.dtype = torch.float32) -> "Call":
        if name in FAMILIES:
            family = FAMILIES[name]
            return cls(family.build, lambda g: family.arguments(*family.sizes[0], g), dtype)
        return cls(MODELS[name].build, MODELS[name].arguments, dtype)

    def made(self) -> tuple[nn.Module, tuple, dict]:
        def cast(value):
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(self.dtype) if floating else value

        torch.manual_seed(1)
        args, kwargs = self.arguments(torch.Generator().manual_seed(2))
        model = self.build().to(self.dtype).train()
        if hasattr(model, "config") and "pixel_values" in kwargs:
            model.config.problem_type = "single_label_classification"  # the first call would set it
        return model, tuple(map(cast, args)), {name: cast(v) for name, v in kwargs.items()}


def check(
    call: Call,
    optimizer: str | None = "adamw_dw",
    accumulate: bool = False,
    keep: bool | None = None,
    release: bool = False,
) -> dict:
    """Compares the peak of a step, behind one that has made the optimizer's states. ``release``: gradients are updated
    one by one during backward."""
    report = {}
    trained = None

    def prepare():
        nonlocal report, trained
        trained, args, kwargs = call.made()
        updates = None if optimizer is None else optimizer_of(optimizer, trained)
        if release:
            updates.release_gradients(pending_bytes=0)
        report = dw.dryrun(
            trained, (args, kwargs), target=EMULATED, optimizer=updates if release else optimizer, accumulate=accumulate,
            keep_outputs=keep,
        )  # fmt: skip
        dw.optimize(trained, target=EMULATED, verbose=False)

        def step() -> None:
            result = trained(*args, **kwargs)
            loss = getattr(result, "loss", None)
            if loss is None:
                result.backward(torch.ones_like(result))
            else:
                if not keep:
                    del result
                loss.backward()
            if updates is not None:
                updates.step()
            if not accumulate:
                trained.zero_grad(set_to_none=True)

        return step

    peaks = counted_peaks(prepare, 2)
    assert engine_calls(trained) == (2, 0), dw.summary(trained)
    difference = peaks[-1] - report["peak_bytes"]
    if optimizer == "adamw":
        # The counts of steps are not the GPU's, and on a CPU foreach makes small tensors.
        difference -= 4 * len(list(trained.parameters()))
        assert 0 <= difference <= 16, (peaks, report["moments"])
    elif release:
        # The workspace is counted for all parameters, and here each has a call of its own.
        workspace = gpu_memory._workspace([(p.nbytes, p.dtype) for p in trained.parameters()], None)
        assert -workspace <= difference <= 0, (peaks, report["moments"])
    else:
        assert difference == 0, (peaks, report["moments"])
    return report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama", "vit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "t5"))],
)
def test_counted_memory(name, dtype) -> None:
    report = check(Call.of(name, dtype))
    assert report["target"] == EMULATED and report["plan_exact"]


def test_released_gradients() -> None:
    whole, released = check(Call.of("gpt2")), check(Call.of("gpt2"), release=True)
    assert released["moments"][-1]["gradients"] == 0
    assert released["peak_bytes"] <= whole["peak_bytes"]


def test_released_gradients_that_are_not_counted() -> None:
    model, args, kwargs = Call.of("gpt2").made()
    optimizer = dw.AdamW(model.parameters())
    optimizer.release_gradients(accumulation=2)
    for target in (EMULATED, "cpu"):
        with pytest.raises(UnsupportedError, match="release_gradients is predicted on a GPU"):
            dw.dryrun(model, (args, kwargs), target=target, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused"])
def test_optimizers_of_pytorch(optimizer) -> None:
    report = check(Call.of("gpt2"), optimizer)
    states = report["moments"][-1]["optimizer"]
    model = MODELS["gpt2"].build()
    bytes_of, count = sum(p.nbytes for p in model.parameters()), len(list(model.parameters()))
    assert states == 2 * bytes_of + (4 * count if optimizer == "adamw_fused" else 0)
    assert report["moments"][-1]["temporaries"] == (bytes_of if optimizer == "adamw" else 0)


@pytest.mark.parametrize("accumulate, keep", [(True, None), (False, True)])
def test_ways_to_train(accumulate, keep) -> None:
    check(Call.of("llama"), accumulate=accumulate, keep=keep)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [False, True])
def test_parts_and_segments(accumulate) -> None:
    """Segments are freed while backward runs, and gradients are made part by part."""
    call = Call(Wide, lambda g: ((torch.randn(3, 1500, generator=g),), {}))
    report = check(call, optimizer=None, accumulate=accumulate)
    parts = [m for m in report["moments"] if m["phase"] == "backward"]
    assert len(parts) > 1
    assert min(m["arena"] for m in parts) < parts[0]["arena"] <= report["arena"]["bytes"]


class Dropped(nn.Module):
    """Draws a seed, and gets an argument that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(40, 33)
        self.dropout = nn.Dropout(0.5)
        self.outer = nn.Linear(33, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.dropout(torch.tanh(self.inner(x))))


def test_seeds_and_copies_of_operands() -> None:
    call = Call(Dropped, lambda g: ((torch.randn(40, 7, generator=g).t(),), {}))
    report = check(call)
    x = 4 * 40 * 7
    assert report["moments"][0]["inputs"] == 2 * x + 16


# ---- for a GPU that is not here -------------------------------------------------------------------------------------


def test_a_planned_gpu_is_as_an_emulated_one(monkeypatch) -> None:
    """Without cuBLASLt, whose workspace only a GPU tells, both have the same plan."""
    model, args, kwargs = Call.of("llama", torch.bfloat16).made()
    emulated = dw.dryrun(model, (args, kwargs), target=EMULATED)
    monkeypatch.setenv("DEEPWELL_CUBLASLT", "off")
    planned = dw.dryrun(model, (args, kwargs), target="sm_90a")
    assert planned["arena"] == emulated["arena"] and not planned["plan_exact"]
    assert [m["gradients"] for m in planned["moments"]] == [
        m["gradients"] for m in emulated["moments"]
    ]
    monkeypatch.delenv("DEEPWELL_CUBLASLT")
    with_library = dw.dryrun(model, (args, kwargs), target="sm_90a")
    assert with_library["arena"]["bytes"] > planned["arena"]["bytes"]


def test_hardware_and_the_meta_device() -> None:
    made = MODELS["gpt2-124m"]
    with torch.device("meta"):
        model = made.build().to(torch.bfloat16).train()
    call = made.arguments(torch.Generator().manual_seed(1))
    report = dw.dryrun(model, call, hw="h200", optimizer="adamw_fused")
    assert report["target"] == "sm_90a" and report["fits"] is True
    assert 139 < report["capacity_gib"] < 141
    assert report["threads"] is None and report["library_known"]
    for moment in report["moments"]:
        assert sum(moment[field] for field in gpu_memory.FIELDS) == moment["total"]
        assert moment["total"] <= moment["allocated"] <= moment["allocated_most"]
        assert moment["allocated"] < moment["total"] + 512 * moment["blocks"]
    assert report["peak_bytes"] == max(m["total"] for m in report["moments"])
    assert report["allocated_bytes"] == max(m["allocated"] for m in report["moments"])
    update = report["moments"][-1]
    count = sum(1 for _ in model.parameters())
    assert update["optimizer"] == 2 * update["parameters"] + 4 * count
    ids = torch.zeros(2048, 1024, dtype=torch.long, device="meta")
    large = dw.dryrun(model, {"input_ids": ids, "labels": ids}, hw="h100")
    assert large["fits"] is False and large["memory_gb"] > 80
    unnamed = dw.dryrun(model, call, target="sm_90a")
    if not torch.cuda.is_available():
        assert unnamed["capacity_gb"] is None and unnamed["fits"] is None
        assert unnamed["moments"] != report["moments"]  # another optimizer
    on_cpu = dw.dryrun(model, call, hw="h200", target="cpu")
    assert on_cpu["target"] == "cpu" and "allocated_bytes" not in on_cpu


def test_scratch_waits_until_logits_are_released() -> None:
    """The peak of a language model is where its head's gradient begins: the arena's scratch for the layers is not there
    yet, and later the logits are not there any more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(hidden_size=1024, num_hidden_layers=6, intermediate_size=4096, vocab_size=64000,
                        num_attention_heads=8, num_key_value_heads=8, use_cache=False)
        ).to(torch.bfloat16)  # fmt: skip
        ids = torch.zeros(4, 2048, dtype=torch.long)
    report = dw.dryrun(model, {"input_ids": ids, "labels": ids}, target="sm_90a", optimizer=None)
    forward, *parts = report["moments"][:-1]
    logits = 8192 * 64000 * 2
    assert report["peak"] == parts[0] and parts[0]["arena"] == forward["arena"]
    scratch = parts[1]["arena"] - (forward["arena"] - logits)
    assert 0 < scratch < logits


def test_logits_that_are_left_out() -> None:
    """Logits that take more than all that forward saves and the gradients are made in blocks again; those of
    test_counted_memory are kept."""
    call = Call(
        lambda: gpt2(n_layer=1, n_embd=16, n_head=2, vocab_size=1009),
        lambda g: language_model_arguments(1009)(4, 40, g),
        torch.bfloat16,
    )
    report = check(call)
    assert report["arena"]["saved_bytes"] < 2 * 4 * 40 * 1009


def test_parameters_that_are_moved_have_storages_of_their_own() -> None:
    """Two buffers that share a storage on the CPU do not on a GPU; tied parameters do."""

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)
            self.second = nn.Linear(8, 8, bias=False)
            self.second.weight = self.first.weight
            numbers = torch.randn(16)
            self.register_buffer("low", numbers[:8])
            self.register_buffer("high", numbers[8:])

        def forward(self, x):
            return self.second(torch.tanh(self.first(x) + self.low)) * self.high

    model, x = Shares(), torch.randn(4, 8)
    planned = dw.dryrun(model, (x,), target="sm_90a")["moments"][0]
    emulated = dw.dryrun(model, (x,), target=EMULATED)["moments"][0]
    for moment in (planned, emulated):
        assert moment["parameters"] == 4 * 64
        assert moment["inputs"] + moment["constants"] + moment["resident"] == 4 * (32 + 16) + 4
    assert planned["blocks"] > 0


def test_optimizers_as_objects() -> None:
    model, args, kwargs = Call.of("gpt2").made()

    def update(optimizer):
        return dw.dryrun(model, (args, kwargs), target="sm_90a", optimizer=optimizer)["moments"][-1]

    parameters = list(model.parameters())
    assert update(torch.optim.AdamW(parameters)) == update("adamw") == update(torch.optim.AdamW)
    assert update(torch.optim.AdamW(parameters, fused=True)) == update("adamw_fused")
    assert update(dw.AdamW(parameters)) == update("adamw_dw") == update(dw.AdamW)
    clipped = update(dw.AdamW(parameters, max_grad_norm=1.0))
    assert clipped["optimizer"] > update("adamw_dw")["optimizer"] + 4
    for options in (dict(amsgrad=True), dict(capturable=True), dict(foreach=False)):
        with pytest.raises(UnsupportedError, match="adamw_fused"):
            update(torch.optim.AdamW(parameters, **options))


def test_what_is_not_supported() -> None:
    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(dw.CaptureError):
        dw.dryrun(Branches(), (x,), target="sm_90a")
    with pytest.raises(UnsupportedError, match="not supported.*sm_100a"):
        dw.dryrun(model, (x,), hw="b200")
    with pytest.raises(UnsupportedError, match="sm_80.*'sm_90a'"):
        dw.dryrun(model, (x,), target="sm_80")
    with pytest.raises(UnsupportedError, match="not supported.*float64"):
        dw.dryrun(model.double(), (x.double(),), target="sm_90a")


def test_rounding() -> None:
    assert [gpu_memory.rounded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
