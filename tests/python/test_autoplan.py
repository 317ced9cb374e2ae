"""deepwell.autoplan and the program `deepwell plan`, which share the C code."""

import json
import subprocess

import deepwell as dw
import pytest
import torch
from program import PROGRAM


@pytest.fixture(scope="module")
def plan():
    return dw.autoplan("llama3-70b", hw="h100:64", seq_len=8192, global_batch=256)


def test_a_plan_fits_and_says_what_it_costs(plan):
    layout = plan.layout
    assert plan.fits and layout.gpus == 64
    assert layout.tp * layout.cp * layout.pp * layout.dp == 64
    assert plan.bubble_fraction < 0.05 and 0.3 < plan.mfu < 0.7
    assert plan.memory_gib < 80 and plan.hardware.name == "h100"
    tokens = layout.global_batch * layout.seq_len
    assert plan.tokens_per_second * 64 * plan.step_time_ms / 1e3 == pytest.approx(tokens)
    assert sum(plan.prediction["time"].values()) == pytest.approx(plan.step_time_ms / 1e3)
    losses = [other["loss"] for other in plan.runners_up]
    assert losses == sorted(losses) and losses[0] > -0.005
    text = plan.explain()
    assert "Runners-up" in text and "What if" in text and "llama3-70b" in text


def test_plan_file_round_trips(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    back = dw.Plan.load(path)
    assert back.to_json() == plan.to_json() and back.layout == plan.layout
    # An edited plan without its prediction is predicted again.
    file = json.loads(plan.to_json())
    del file["prediction"]
    file["layout"]["cuda_graphs"] = True
    edited = dw.Plan.from_json(json.dumps(file))
    assert edited.step_time_ms <= plan.step_time_ms
    file["layout"]["tp"] = 3
    with pytest.raises(dw.DeepwellError, match="tp 3"):
        dw.Plan.from_json(json.dumps(file))


def test_constraints_and_layouts_that_do_not_fit():
    plan = dw.autoplan(
        "llama3-8b", hw="h100:8", seq_len=4096, global_batch=32, constraints={"tp": 4, "pp": 2}
    )
    assert (plan.layout.tp, plan.layout.pp) == (4, 2)
    short = dw.autoplan("llama3-405b", hw="h100:8", seq_len=4096, global_batch=32)
    assert not short.fits and short.gpus_needed > 8 and "GiB" in short.tightest
    assert str(short.gpus_needed) in str(short)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"constraints": ["tp=8", "tp<=4"]}, "contradicts"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"seq_len": -1}, "seq_len is -1"),
        ({"hw": "h100:0"}, '"0" GPUs'),
        ({"hw": "h100:10000000"}, "10000000"),
        ({"arch": "blackwell-sm100"}, "sm_90a"),
        ({"arch": "fast"}, "sm100"),
        ({"precision": "mxfp8"}, "mxfp8"),
        ({"precision": "int3"}, "int3"),
        ({"moe": {"experts": 8, "colour": 1}}, "'colour'"),
        ({"reserve_gb": 100.0}, "reserve"),
        ({"model": 7}, "got int"),
        ({"model": {"layers": 2}}, "hidden"),
    ],
)
def test_bad_requests(changes, message):
    request = {"model": "llama3-8b", "hw": "h100:8", "seq_len": 4096, "global_batch": 32, **changes}
    with pytest.raises(dw.DeepwellError, match=message):
        dw.autoplan(request.pop("model"), **request)


def test_models_of_every_kind(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    (tmp_path / "small").mkdir()
    config.save_pretrained(tmp_path / "small")
    model = transformers.LlamaForCausalLM(config)
    request = {"hw": "h100:8", "seq_len": 512, "global_batch": 64}
    from_folder = dw.autoplan(tmp_path / "small", **request)
    from_model = dw.autoplan(model, **request)
    assert from_folder.model_name == "small"
    from_fields = dw.autoplan(
        {key: value for key, value in vars(from_folder.model).items() if key != "name"}, **request
    )
    from_graph = dw.autoplan(dw.capture(model), **request)
    assert from_graph.layout == from_folder.layout
    assert from_graph.step_time_ms == pytest.approx(from_folder.step_time_ms, rel=1e-9)
    assert from_folder.layout == from_model.layout == from_fields.layout
    assert from_folder.prediction == from_model.prediction == from_fields.prediction


class _Block(torch.nn.Module):
    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, heads, ffn, dropout=0.0, batch_first=True)
        self.inner = layer

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("blocks", [False, True])
def test_layers_inside_a_sequential(blocks):
    """The positions of an nn.Sequential are not the layers: the embedding and the head stand among them."""
    width, heads, ffn, layers, words = 64, 4, 160, 3, 1000
    inner = [_Block(width, heads, ffn) for _ in range(layers)]
    if not blocks:
        layer = torch.nn.TransformerEncoderLayer(width, heads, ffn, dropout=0.0, batch_first=True)
        inner = [torch.nn.TransformerEncoder(layer, layers)]
    model = torch.nn.Sequential(
        torch.nn.Embedding(words, width),
        *inner,
        torch.nn.LayerNorm(width),
        torch.nn.Linear(width, words),
    )
    ir = dw.capture(model, (torch.zeros(2, 16, dtype=torch.long),))
    plan = dw.autoplan(ir, hw="h100:8", seq_len=512, global_batch=64, what_ifs=False)
    got = plan.model
    assert (got.layers, got.hidden, got.heads, got.ffn) == (layers, width, heads, ffn)
    assert got.vocabulary == words and not got.tied
    assert got.parameters == sum(p.numel() for p in model.parameters())


def test_graph_without_layers_is_rejected():
    """Two attentions in one unnumbered module do not form layers of a list."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 160, dropout=0.0, batch_first=True)
    shared = torch.nn.Sequential(torch.nn.Embedding(1000, 64), layer, torch.nn.Linear(64, 72))
    ir = dw.capture(shared, (torch.zeros(2, 16, dtype=torch.long),))
    with pytest.raises(dw.DeepwellError, match="layer 2 of the graph has 0 recognized attentions"):
        dw.autoplan(ir, hw="h100:8", seq_len=512, global_batch=64)


def test_experts_by_keyword():
    request = dict(
        hw="h100:64", seq_len=4096, global_batch=256, constraints=["ep=8", "tp=1", "pp=1"]
    )
    plan = dw.autoplan("llama3-8b", moe={"experts": 8}, **request)
    assert plan.model.experts == 8 and plan.model.top_k == 2
    assert plan.model.expert_ffn == 14336
    assert plan.prediction["time"]["gemm"] > 0


def test_uneven_expert_load_costs_time_and_memory():
    """An expert with 1.25 times the rows costs more time and activations, at most 1.25 times as much."""
    layout = ["ep=8", "tp=1", "pp=1", "micro_batch=1", "recompute=none"]
    request = dict(hw="h200:64", seq_len=4096, global_batch=256, constraints=layout)
    even = dw.autoplan("mixtral-8x7b", **request).prediction
    for name in ("capacity_factor", "imbalance"):
        full = dw.autoplan("mixtral-8x7b", moe={name: 1.25}, **request).prediction
        for part, whole in (("time", "gemm"), ("memory", "activations")):
            assert 1.05 < full[part][whole] / even[part][whole] < 1.25
    for wrong in (0.5, 0, -1, 1e9, "1.25", True, float("nan")):
        with pytest.raises(dw.DeepwellError, match="expected 1 to 1000"):
            dw.autoplan("mixtral-8x7b", moe={"capacity_factor": wrong}, **request)
    with pytest.raises(dw.DeepwellError, match="no experts"):
        dw.autoplan("llama3-8b", moe={"imbalance": 2}, **request)


def run(*words):
    return subprocess.run([PROGRAM, "plan", *words], capture_output=True, text=True, timeout=120)


ASKED = [
    "--model",
    "llama3-8b",
    "--hardware",
    "h100:16",
    "--seq-len",
    "8192",
    "--global-batch",
    "64",
]


@pytest.mark.skipif(not PROGRAM.exists(), reason="the program is not built")
def test_the_program(tmp_path):
    path = tmp_path / "plan.json"
    done = run(*ASKED, "--explain", "-o", str(path))
    assert done.returncode == 0, done.stderr
    for word in ("Layout", "Step", "MFU", "Memory", "Runners-up", "What if"):
        assert word in done.stdout
    python = dw.autoplan("llama3-8b", hw="h100:16", seq_len=8192, global_batch=64)
    assert json.loads(path.read_text()) == json.loads(python.to_json())
    done = run(*ASKED, "--json", "--set", "tp=2", "pp<=2", "--precision", "fp8-tensor")
    layout = json.loads(done.stdout)["layout"]
    assert layout["tp"] == 2 and layout["pp"] <= 2 and layout["precision"] == "fp8-tensor"
    assert run("--help").stdout.startswith("Usage: deepwell plan")


@pytest.mark.skipif(not PROGRAM.exists(), reason="the program is not built")
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--model", "llama3-8b"], 2, "--hardware"),
        ([*ASKED, "--colour"], 2, "--colour"),
        ([*ASKED, "--set"], 2, "--set"),
        ([*ASKED, "--seq-len", "many"], 2, "many"),
        ([*ASKED, "--precision", "int3"], 2, "int3"),
        ([*ASKED, "--reserve", "-1"], 2, "--reserve"),
        ([*ASKED, "--set", "tp=3"], 1, '"tp=3"'),
        ([*ASKED, "--model", "llama9"], 1, "llama9"),
        ([*ASKED, "--hardware", "h100:0"], 1, '"0" GPUs'),
    ],
)
def test_program_rejects_invalid_requests(words, code, message):
    done = run(*words)
    assert done.returncode == code and message in done.stderr and done.stdout == ""
    assert done.stderr.count("\n") <= 2


@pytest.mark.skipif(not PROGRAM.exists(), reason="the program is not built")
def test_program_suggests_a_layout_that_fits():
    done = run(*ASKED, "--model", "llama3-405b")
    assert done.returncode == 1 and done.stderr == ""
    assert "The largest need is" in done.stdout and "of these GPUs" in done.stdout


def test_limits_of_the_prediction_are_stated(plan, tmp_path):
    """The plan states unmeasured parts, a framework whose training is not built, positions, and the peak that
    MFU refers to.
    """
    assert plan.unmeasured == "" and plan.layout.offload_layers == 0
    assert plan.bolder and all(other["unmeasured"] and other["loss"] < 0 for other in plan.bolder)
    assert "Bolder" in str(plan) and plan.bolder[0]["unmeasured"] in str(plan)
    (framework,) = plan.remarks
    assert "not built" in framework and framework in str(plan)
    bold = dw.autoplan(
        "llama3-70b", hw="h100:64", seq_len=8192, global_batch=256, bold=True, what_ifs=False
    )
    assert bold.unmeasured and bold.bolder == [] and bold.step_time_ms < plan.step_time_ms
    assert f"not measured: {bold.unmeasured}" in str(bold)
    assert dw.Plan.from_json(bold.to_json()).to_json() == bold.to_json()
    request = dict(hw="rtx5090:4", global_batch=64, what_ifs=False)
    run = dw.autoplan("gpt2", seq_len=32768, constraints={"framework": "fsdp"}, **request)
    (positions,) = run.remarks
    assert "1,024 positions" in positions and "32,768 tokens" in positions
    assert (
        dw.autoplan("gpt2", seq_len=1024, constraints=["framework=fsdp"], **request).remarks == []
    )
    text = str(run)
    assert "4 x rtx5090, none joined by NVLink" in text and "124 million parameters" in text
    low = dw.autoplan(
        "llama3-8b", hw="h100:8", seq_len=8192, global_batch=64, precision="fp8", what_ifs=False
    )
    share = 100 * low.mfu * low.hardware.rates["bf16"].value / low.hardware.rates["fp8"].value
    assert f"MFU {100 * low.mfu:.1f}% of the BF16 peak, {share:.1f}% of the fp8 peak" in str(low)
    figures = dw.dryrun(low)
    assert figures["peak_rate"] == "fp8"
    assert figures["peak_utilization"] == pytest.approx(figures["mfu"] * share / 100 / low.mfu)


def test_large_numbers_are_written_out():
    fields = vars(dw.autoplan("llama3-405b", hw="b200:512", seq_len=8192, global_batch=512).model)
    fields = {**fields, "layers": 2600, "parameters": 0.0, "active": 0.0}
    plan = dw.autoplan(fields, hw="b200:16384", seq_len=8192, global_batch=8192, what_ifs=False)
    assert "8.3 trillion parameters" in str(plan) and "16,384 x b200" in str(plan)
    assert "e+" not in str(plan)


def test_the_host_s_memory_and_the_kernels_by_name():
    arguments = dict(hw="h100:8", seq_len=8192, global_batch=64, what_ifs=False)
    plans = {
        word: dw.autoplan("llama3-8b", constraints={"offload": word}, **arguments)
        for word in ("none", "activations", "optimizer", "all")
    }
    for word, plan in plans.items():
        assert (plan.layout.offload_layers > 0) == (word in ("activations", "all"))
        assert plan.layout.offload_optimizer == (word in ("optimizer", "all"))
        assert (plan.prediction["host_optimizer"] > 0) == plan.layout.offload_optimizer
        assert ("Host" in str(plan)) == (word != "none")
    assert plans["none"].step_time_ms < plans["optimizer"].step_time_ms
    kernels = {kernel["operation"]: kernel for kernel in plans["none"].kernels}
    attention = kernels["attention forward"]
    assert attention["kernel"].startswith("deepwell, sm_90a: tiles of ")
    assert attention["measured"] > attention["predicted"] > 0
    assert "library" in kernels["MLP up"]["kernel"]
    with pytest.raises(dw.DeepwellError, match="none, activations, optimizer, all"):
        dw.autoplan("llama3-8b", constraints={"offload": "some"}, **arguments)
