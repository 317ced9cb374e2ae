"""The engine on a GPU, through optimize: whole models, forward and backward, on an emulated H100 with its checker on. The
emulator is slow, so the models are small. tests/gpu has the tests that need a GPU."""

from __future__ import annotations

import copy
import json
import re
import sys

import deepwell
import mixtures
import pytest
import torch
from compilers import needs_blackwell_compiler
from deepwell import _deepwell, runtime
from deepwell.targets import Gpu, Target
from torch import nn
from users import BF16_UNIT, Net, close, engine_calls, rows, same, train_step, uneven

EMULATED = "emulator:sm_90a"
RTX = "emulator:sm_120a"
optimize_module = sys.modules["deepwell.optimize"]  # its name in the package is the function


@pytest.fixture(autouse=True)
def _with_a_compiler():
    if not _deepwell.jit_compiler():
        pytest.skip("elementwise programs need NVRTC")


@pytest.mark.parametrize(
    "devices, capability, whole, chosen",
    [
        (["cuda:0", "cuda:0"], (9, 0), True, True),
        (["cuda:1"], (9, 0), True, True),
        (["cuda:0", "cuda:1"], (9, 0), True, False),
        (["cuda:0", "cpu"], (9, 0), True, False),
        (["cuda:0"], (8, 0), True, False),
        (["cuda:0"], (10, 0), True, False),
        (["cuda:0"], (9, 0), False, False),
    ],
)
def test_auto_chooses_the_engine_on_one_hopper(
    monkeypatch, devices, capability, whole, chosen
) -> None:
    """``whole``: forwards see whole parameters."""

    class Placed:
        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

    tensors = {str(i): Placed(device) for i, device in enumerate(devices)}
    monkeypatch.setattr(optimize_module, "named_tensors", lambda root: tensors)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(optimize_module, "gathers", lambda root: whole)
    assert optimize_module._is_on_one_hopper(nn.Linear(1, 1)) == chosen


def test_auto_follows_a_model_that_is_moved(monkeypatch) -> None:
    """From a device where this model is not, back to the CPU. tests/gpu/test_support.py moves models."""
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")
    for target, followed in (("auto", True), ("cpu", False)):
        plain = Net()
        ours = deepwell.optimize(copy.deepcopy(plain), target=target, verbose=False)
        ours.forward.session.target = Gpu(0)
        same(plain, ours, train_step)
        assert engine_calls(ours) == ((1, 0) if followed else (0, 1)), deepwell.summary(ours)
        ours.to("meta")
        ours.forward.session.follow(ours)
        assert type(ours.forward.session.target) is (Target if followed else Gpu)


def pair(build) -> tuple[nn.Module, nn.Module]:
    plain = build()
    return plain, deepwell.optimize(copy.deepcopy(plain), target=EMULATED, verbose=False)


def errors(model: nn.Module, reference: nn.Module, arguments: dict) -> dict[str, float]:
    """Returns the distance of logits and of each gradient from those of the reference, relative to their norm."""
    results = []
    for each in (model, reference):
        output = each(**arguments)
        output.loss.backward()
        found = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
        results.append({"logits": output.logits, **found})
    ours, right = results
    assert ours.keys() == right.keys()
    return {
        name: ((ours[name].double() - value).norm() / value.norm()).item()
        for name, value in right.items()
    }


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=64, n_head=2, n_positions=32, vocab_size=96,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                    intermediate_size=96, vocab_size=96)
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_models_are_as_exact_as_in_pytorch(build, dtype) -> None:
    """The distance from FP64 is at most 1.5 times PyTorch's in F32, where orders of summation decide it, and 1.1 times in
    BF16, where roundings that both make decide it."""
    ids = torch.randint(0, 96, (2, 13), generator=torch.Generator().manual_seed(3))
    arguments = {"input_ids": ids, "labels": ids}
    plain = build().to(dtype)
    reference = copy.deepcopy(plain).double()
    ours = deepwell.optimize(copy.deepcopy(plain), target=EMULATED, verbose=False)
    found = errors(ours, copy.deepcopy(reference), arguments)
    expected = errors(plain, reference, arguments)
    assert engine_calls(ours) == (1, 0), deepwell.summary(ours)
    most = 1.5 if dtype == torch.float32 else 1.1
    floor = 2.0**-22 if dtype == torch.float32 else 2.0**-10
    for name, error in found.items():
        assert error <= most * max(expected[name], floor), (name, error, expected[name])


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(3)
    return T5ForConditionalGeneration(
        T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0,
                 decoder_start_token_id=0, pad_token_id=0, use_cache=False)
    )  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(4)
    return BertForMaskedLM(
        BertConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                   max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )  # fmt: skip


def graphs_of_engines(monkeypatch) -> list[str]:
    """The returned list receives the graph after passes of each engine that is made later."""
    found: list[str] = []
    make = runtime._Variant.__init__

    def made(self, *arguments, **named) -> None:
        make(self, *arguments, **named)
        found.append(self.engine.text())

    monkeypatch.setattr(runtime._Variant, "__init__", made)
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("build", [t5, bert])
def test_masks_and_biases_stay_in_attention(
    monkeypatch, without_first_use_check, build, padded
) -> None:
    """Scores are never stored: a learned bias and padding are operands of the attention kernels. The distance from FP64 is
    at most 1.5 times PyTorch's, which rounds the scores but neither weights nor gradients of scores in its backward."""
    graphs = graphs_of_engines(monkeypatch)
    draw = torch.Generator().manual_seed(5)
    arguments = {
        name: torch.randint(1, 96, (2, rows), generator=draw)
        for name, rows in (("input_ids", 40), ("labels", 24 if build is t5 else 40))
    }
    if padded:
        arguments["attention_mask"] = (torch.arange(40) < torch.tensor([[40], [27]])).long()
    plain = build().bfloat16()
    reference = copy.deepcopy(plain).double()
    ours = deepwell.optimize(copy.deepcopy(plain), target=EMULATED, verbose=False)
    found = errors(ours, copy.deepcopy(reference), arguments)
    expected = errors(plain, reference, arguments)
    assert engine_calls(ours) == (1, 0), deepwell.summary(ours)
    layers = 6 if build is t5 else 2
    graph = max(graphs, key=len)  # forward and backward; the other has no backward
    assert graph.count(" = attention(") == graph.count(" = attention_backward(") == layers
    assert graph.count("mask_gradient=1") == (4 if build is t5 else 0)
    assert not re.search(r"\[B, 4, [^]]*\] = matmul\(", graph)
    for name, error in found.items():
        assert error <= 1.5 * max(expected[name], 2.0**-10), (name, error, expected[name])


@pytest.mark.parametrize(
    "build, dtype",
    [(mixtures.mixtral, torch.float32), (mixtures.qwen3_moe, torch.bfloat16)],
    ids=["mixtral-f32", "qwen3-moe-bf16"],
)
def test_mixtures_train_on_sorted_rows(monkeypatch, without_first_use_check, build, dtype) -> None:
    """Forward and backward compute on rows that are sorted by expert: no operand has a matrix per token, and no
    gradient is scattered to the tokens. The distance from FP64 is at most twice PyTorch's, because the router's gradient is a small
    difference of sums whose order differs. (test_operations_gpu.c runs the first-use checks of these kernels.)"""
    graphs = graphs_of_engines(monkeypatch)
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(3))
    arguments = {"input_ids": ids, "labels": ids}
    torch.manual_seed(3)
    plain = mixtures.spread(build(num_hidden_layers=1)).to(dtype)
    reference = copy.deepcopy(plain).double()
    ours = deepwell.optimize(copy.deepcopy(plain), target=EMULATED, verbose=False)
    found = errors(ours, copy.deepcopy(reference), arguments)
    expected = errors(plain, reference, arguments)
    assert engine_calls(ours) == (1, 0), deepwell.summary(ours)
    graph = max(graphs, key=len)
    # Experts narrower than the model (Qwen3-MoE's) take the router's weights before the last GEMM: these are sorted,
    # forward and again backward, and the gradient of its result is spread by itself.
    early = build is mixtures.qwen3_moe
    counts = {
        "group_rows": 1, "segment_linear": 4, "segment_linear_backward_weight": 2, "spread_rows": 2 + 3 * early,
        "combine_rows": 2 + early, "combine_rows_backward": not early, "grouped_linear": 0,
    }  # fmt: skip
    assert {name: graph.count(f" = {name}(") for name in counts} == counts
    assert not re.search(r" = (take|scatter_add)\(.* experts ", graph)
    assert (
        len(re.findall(r" = reduce_sum\(.* experts ", graph)) == early
    )  # of the gradient of the weights
    floor = 2.0**-22 if dtype == torch.float32 else 2.0**-8
    for name, error in found.items():
        assert error <= 2.0 * max(expected[name], floor), (name, error, expected[name])


def test_a_network_trains() -> None:
    def use(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for seed in range(3):
            optimizer.zero_grad()
            losses.append(train_step(model, seed))
            optimizer.step()
        return losses

    plain, ours = pair(Net)
    same(plain, ours, use)
    assert engine_calls(ours) == (3, 0)


def test_autocast() -> None:
    def use(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(rows())
        uneven(y.float()).backward()
        return y.detach()

    plain, ours = pair(Net)
    same(plain, ours, use, BF16_UNIT)
    assert engine_calls(ours) == (1, 0)


def test_sizes_that_change_and_two_forwards_before_a_backward() -> None:
    plain, ours = pair(Net)
    for model in (plain, ours):
        first, second = model(rows(1, 4)), model(rows(2, 7))
        (uneven(first) + uneven(second)).backward()
        model.results = first.detach(), second.detach()
    for a, b in zip(ours.results, plain.results):
        close(a, b)
    for a, b in zip(ours.parameters(), plain.parameters()):
        close(a.grad, b.grad)


class Wide(nn.Module):
    """A few rows through layers that are each large enough for a part of backward of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(1500, 1500, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.slow
def test_segments_are_freed_while_backward_runs(monkeypatch) -> None:
    """The emulator refuses an access to memory that was freed. The first backward keeps the graph, and so a copy."""
    from deepwell.arena import Lease

    freed = []
    free = Lease.free

    def counted(lease, which):
        free(lease, which)
        freed.extend(which)

    monkeypatch.setattr(Lease, "free", counted)

    def use(model):
        x = torch.randn(3, 1500, generator=torch.Generator().manual_seed(5))
        y = uneven(model(x))
        y.backward(retain_graph=True)
        y.backward()

    plain, ours = pair(Wide)
    same(plain, ours, use)
    assert engine_calls(ours) == (1, 0)
    assert freed and freed == freed[: len(freed) // 2] * 2


def test_an_index_outside_is_an_error() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.GELU())
    deepwell.optimize(model, target=EMULATED, verbose=False)
    with pytest.raises(IndexError, match="outside of its axis"):
        model(torch.tensor([[1, 5]]))


def test_dropout_repeats_with_its_seed() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 8))
    deepwell.optimize(model, target=EMULATED, verbose=False)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(model(rows()))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert engine_calls(model) == (3, 0)


class DroppedWeights(nn.Module):
    """The weights of two attentions after dropout: values are rows of the identity."""

    def forward(self, q, k, rows_of_one):
        attend = nn.functional.scaled_dot_product_attention
        first = attend(q, k, rows_of_one, dropout_p=0.1)
        return first, attend(q, k, rows_of_one, dropout_p=0.1)


@pytest.fixture
def without_first_use_check(monkeypatch) -> None:
    """test_attention_first_use runs these checks on the emulator, where they take most of the time."""
    monkeypatch.setenv("DEEPWELL_FIRST_USE_CHECK", "off")


class Mlp(nn.Module):
    """An MLP with separate matrices of gate and up, as in Llama."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.gate, self.up = (nn.Linear(72, 200, bias) for _ in range(2))
        self.down = nn.Linear(200, 72, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_are_one_launch(monkeypatch, without_first_use_check, bias) -> None:
    plain = Mlp(bias).bfloat16()
    x, dy = torch.randn(2, 90, 72).bfloat16(), torch.randn(2, 90, 72).bfloat16()
    found = []
    for epilogues in ("off", ""):  # empty: the default
        monkeypatch.setenv("DEEPWELL_EPILOGUES", epilogues)
        model = deepwell.optimize(copy.deepcopy(plain), target=EMULATED, verbose=False)
        own = x.clone().requires_grad_()
        y = model(own)
        y.backward(dy)
        plans = [plan for program in model.forward.programs() for plan in program.plans()]
        operations = [
            each for each in json.loads(plans[-1].operations()) if each["phase"] == "forward"
        ]
        pairs = [each for each in operations if each["kernel"] == "sm90_linear_pair"]
        assert len(pairs) == (epilogues == "")
        products = 3 * 2 * 180 * 72 * 200
        assert sum(each["flops"] for each in operations) >= products
        for each in pairs:  # x, both matrices and biases; gate, up and the activation
            assert products * 2 / 3 <= each["flops"] < products
            assert each["bytes"] == 2 * (180 * 72 + 2 * 200 * (72 + bias) + 3 * 180 * 200)
            assert each["seconds"] > 0
        found.append([y.detach(), own.grad, *(p.grad for p in model.parameters())])
    for apart, together in zip(*found):
        assert torch.equal(apart, together)


def test_a_sum_of_two_layers_accumulates(without_first_use_check) -> None:
    """The second layer adds its result to the first one's, which takes no program."""

    class Sum(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gate(x) + self.up(x)

    plain = Sum(False).bfloat16()
    model = deepwell.optimize(copy.deepcopy(plain), target=EMULATED, verbose=False)
    x = torch.randn(2, 45, 72).bfloat16()
    with torch.no_grad():
        close(model(x), plain(x), unit=BF16_UNIT)
    plans = [plan for program in model.forward.programs() for plan in program.plans()]
    kernels = [each["kernel"] for each in json.loads(plans[-1].operations())]
    assert len(kernels) == 2 and "sm90_linear_pair" not in kernels, kernels


def test_masks_of_attention_are_those_of_the_cpu(without_first_use_check) -> None:
    """Each dropout of a model has a stream of its own; an element of the weights is 0 exactly if it is dropped."""
    draw = torch.Generator().manual_seed(4)
    q, k = (torch.randn(2, 3, n, 40, generator=draw).bfloat16() for n in (35, 37))
    rows_of_one = torch.eye(37, 40).bfloat16().expand(2, 3, 37, 40).contiguous()
    masks = []
    for target in ("cpu", EMULATED):
        model = deepwell.optimize(DroppedWeights(), target=target, verbose=False)
        torch.manual_seed(5)
        results = model(q, k, rows_of_one)
        assert engine_calls(model) == (1, 0), deepwell.summary(model)
        masks.append([weights[..., :37] == 0 for weights in results])
    for cpu, gpu in zip(*masks):
        assert torch.equal(cpu, gpu)
        assert (
            0.08 < gpu.double().mean() < 0.12
        )  # of 7770 elements; five standard deviations are 0.017
    assert not torch.equal(*masks[1])


@pytest.mark.slow
def test_gpt2_trains_with_the_dropout_of_the_cpu(without_first_use_check) -> None:
    """With the CPU's masks in every layer, logits and gradients in BF16 are close to the CPU's in F32: at most twice as
    far as the CPU's in BF16, because the GPU's kernels also round the weights and their gradients to BF16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(6)
    plain = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, vocab_size=48, attn_pdrop=0.1)
    ).bfloat16().train()  # fmt: skip
    ids = torch.randint(0, 48, (1, 13), generator=torch.Generator().manual_seed(7))

    def results(dtype, target, seed=8):
        model = copy.deepcopy(plain).to(dtype)
        deepwell.optimize(model, target=target, verbose=False)
        torch.manual_seed(seed)
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        assert engine_calls(model) == (1, 0), deepwell.summary(model)
        return {"logits": output.logits, **{n: p.grad for n, p in model.named_parameters()}}

    right = results(torch.float32, "cpu")

    def distances(found):
        return {
            name: ((found[name].double() - value).norm() / value.norm()).item()
            for name, value in right.items()
        }

    cpu = distances(results(torch.bfloat16, "cpu"))
    gpu = distances(results(torch.bfloat16, EMULATED))
    others = distances(results(torch.float32, "cpu", seed=9))
    for name, error in gpu.items():
        assert error <= 2 * max(cpu[name], 2.0**-9), (name, error, cpu[name])
        assert error < 0.2 * others[name], (name, error, others[name])


@needs_blackwell_compiler
@pytest.mark.parametrize("build", [gpt2, llama])
def test_an_rtx_gpu_trains_by_its_gemms_and_attention(build, without_first_use_check) -> None:
    """All GEMMs and all attention of both passes, as exact as PyTorch's in BF16, and the summary says what the target is."""
    ids = torch.randint(0, 96, (2, 13), generator=torch.Generator().manual_seed(3))
    arguments = {"input_ids": ids, "labels": ids}
    plain = build().bfloat16()
    reference = copy.deepcopy(plain).double()
    ours = deepwell.optimize(copy.deepcopy(plain), target=RTX, verbose=False)
    found = errors(ours, copy.deepcopy(reference), arguments)
    expected = errors(plain, reference, arguments)
    assert engine_calls(ours) == (1, 0) and RTX in deepwell.summary(ours)
    for name, error in found.items():
        assert error <= 1.1 * max(expected[name], 2.0**-10), (name, error, expected[name])
    engine = deepwell.compile(
        copy.deepcopy(plain), example_inputs=arguments, target=RTX, fallback="none"
    )
    kernels = {(op.op, op.kernel) for op in engine.compiled_ops}
    assert {kernel for op, kernel in kernels if op in ("linear", "matmul")} == {"gemm"}
    assert {("attention", "attention"), ("attention_backward", "attention_backward")} <= kernels


def test_copies_run_there_as_well() -> None:
    _, ours = pair(Net)
    expected = ours(rows())
    other = copy.deepcopy(ours)
    assert torch.equal(other(rows()), expected) and engine_calls(other)[1] == 0
    assert EMULATED in deepwell.summary(other)


def test_restored_models_are_as_before() -> None:
    plain, ours = pair(Net)
    ours(rows())
    deepwell.restore(ours)
    assert torch.equal(ours(rows()), plain(rows()))


def test_a_model_that_is_not_on_a_gpu_is_refused() -> None:
    with pytest.raises(deepwell.UnsupportedError, match="for a model on a GPU"):
        deepwell.optimize(Net(), target="sm_90a")
