"""deepwell.PrecisionPolicy: which layers have which precision, its text and files, its messages."""

import copy
import json
import pickle
import re
import warnings
from pathlib import Path

import deepwell
import deepwell as dw
import pytest
import torch
from deepwell import MicroscalingConfig, Precision, PrecisionPolicy, UnsupportedError
from transformers import GPT2Config, GPT2LMHeadModel

OPERANDS = ("forward_x", "forward_w", "dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x")


def gpt2(device="cpu"):
    with torch.device(device):
        torch.manual_seed(0)
        return GPT2LMHeadModel(
            GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=96)
        ).eval()


def rows_of(policy, model):
    """Returns the cells of the table by layer."""
    lines = policy.table(model).splitlines()
    return {
        line.split()[0]: line.split(None, 7)[1:]
        for line in lines[1:]
        if "applies to no" not in line
    }


def test_the_documents_code():
    policy = dw.PrecisionPolicy(
        default_compute=Precision.MXFP8,
        sensitive_layers=["embedding", "final_linear"],
        microscaling=MicroscalingConfig(block_size=32)
    )  # fmt: skip
    assert policy.default_compute is Precision.MXFP8
    assert policy.sensitive_layers == ("embedding", "final_linear")
    assert policy.microscaling == MicroscalingConfig(block_size=32)
    model = dw.optimize(gpt2(), precision=policy, verbose=False)
    ids = torch.arange(12).reshape(1, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    text = dw.summary(model)
    assert "8 linear layers in MXFP8, 1 in the model's own precision" in text
    assert "Policy: MXFP8; sensitive layers: embedding, final_linear" in text
    named = dw.optimize(gpt2(), precision="mxfp8", verbose=False)
    named(input_ids=ids, labels=ids).loss.backward()
    for ours, theirs in zip(model.parameters(), named.parameters()):
        assert torch.equal(ours.grad, theirs.grad)


def test_the_guides_code():
    """docs/precision.md: the policy that it makes is the file that it shows."""
    guide = (Path(__file__).parents[2] / "docs" / "precision.md").read_text()
    blocks = re.findall(r"```(python|json)\n(.*?)```", guide, re.DOTALL)
    made = {"deepwell": dw, "model": gpt2("meta")}
    code = next(text for kind, text in blocks if "PrecisionPolicy(" in text)
    exec(code.partition("model = ")[0], made)
    (text,) = [text for kind, text in blocks if kind == "json"]
    assert PrecisionPolicy.from_json(text) == made["policy"]
    # The one that its advice names.
    (given,) = re.findall(r"`layers=(\{.*\})`", guide)
    table = PrecisionPolicy("mxfp8", layers=json.loads(given)).table(gpt2("meta"))
    assert "bf16" in table and "mxfp8" in table


def test_a_precision_for_each_layer():
    policy = PrecisionPolicy(
        "mxfp8",
        ["norm", "transformer.h.0.attn.c_proj"],
        layers={
            "*.mlp.*": "fp8",
            "transformer.h.0": Precision.BF16,
            "*.c_fc": {"dgrad_dy": "mxfp8-e5m2", "forward_w": "fp8"},
            "*.h.1.attn.c_[a-f]*": {"recipe": "fp8", "forward_x": Precision.MXFP8},
            "nowhere": "fp32",
        },
    )
    rows = rows_of(policy, gpt2("meta"))
    assert rows["transformer.h.0.attn.c_attn"][:6] == ["bf16"] * 6
    assert rows["transformer.h.0.attn.c_proj"][:6] == ["-"] * 6  # its own name wins
    assert rows["transformer.h.0.mlp.c_proj"][:6] == ["bf16"] * 6  # the last match
    fc = ["mxfp8", "fp8-tensor", "mxfp8-e5m2", "mxfp8", "mxfp8", "mxfp8"]
    assert rows["transformer.h.1.mlp.c_fc"] == [*fc, "matches '*.c_fc'"]
    e5m2 = "fp8-tensor-e5m2"
    attn = ["mxfp8", "fp8-tensor", e5m2, "fp8-tensor", e5m2, "fp8-tensor"]
    assert rows["transformer.h.1.attn.c_attn"][:6] == attn
    assert rows["transformer.h.1.attn.c_proj"] == [*["mxfp8"] * 6, "the default"]
    assert rows["lm_head"][:6] == ["mxfp8"] * 6  # the head is not in the list
    assert "'nowhere' applies to no linear layer of this model" in policy.table(gpt2("meta"))
    assert rows_of(PrecisionPolicy(), gpt2("meta"))["lm_head"][6] == "the region head is sensitive"
    assert PrecisionPolicy("bf16").table(gpt2().bfloat16()).count("is BF16 already") == 8
    printed = str(policy)
    assert "region norm" in printed and "fallback safe, blocks of 32, scales by rceil" in printed
    assert printed.splitlines()[-2].split() == ["transformer.h.0.attn.c_proj", *"------"]


def test_the_head_is_quantized_if_it_is_not_sensitive():
    """Its logits are then not left to PyTorch."""
    ids = torch.arange(12).reshape(1, 12)
    results = []
    for sensitive in (None, []):
        model = gpt2()
        dw.optimize(model, precision=PrecisionPolicy("fp8", sensitive), verbose=False)
        results.append(model(input_ids=ids, labels=ids).logits.clone())
    told = dw.summary(model)
    assert "9 linear layers in FP8" in told
    assert not torch.equal(*results)
    torch.testing.assert_close(*results, rtol=0.1, atol=0.05)


def test_text_and_files(tmp_path):
    policies = [
        PrecisionPolicy(),
        PrecisionPolicy(Precision.NVFP4, bf16_share=0.5, fallback="strict"),
        PrecisionPolicy("fp8", fast_accumulation=True),
        PrecisionPolicy(
            {"recipe": "mxfp8", "dgrad_dy": "mxfp8-e5m2"},
            ["lm_head", "a.b", "attention"],
            MicroscalingConfig(32, "floor"),
            layers={'x"\\[!a-]': "fp8", "y": {name: "bf16" for name in OPERANDS}},
        ),
        PrecisionPolicy(
            "fp8-block",
            layers={"a": {"wgrad_dy": "fp8-block+square"}, "b": Precision.FP8_BLOCK},
            guard=dw.PrecisionGuard(every=10),
        ),
    ]
    for policy in policies:
        again = PrecisionPolicy.from_json(policy.to_json())
        assert (
            again == policy and hash(again) == hash(policy) and again.to_json() == policy.to_json()
        )
        assert pickle.loads(pickle.dumps(policy)) == policy == copy.deepcopy(policy)
        policy.save(tmp_path / "policy.json")
        assert PrecisionPolicy.load(tmp_path / "policy.json") == policy
        assert repr(policy).startswith("PrecisionPolicy(")
        # The arguments that it reports make it again.
        made = PrecisionPolicy(
            policy.default_compute,
            policy.sensitive_layers,
            policy.microscaling,
            layers=policy.layers,
            bf16_share=policy.bf16_share,
            fallback=policy.fallback,
            fast_accumulation=policy.fast_accumulation,
            guard=policy.guard,
        )
        assert made == policy
    assert "fast accumulation" in str(policies[2]) and policies[2] != PrecisionPolicy("fp8")
    assert policies[0] != policies[1] and policies[0] != "mxfp8"
    assert policies[3].layers == {'x"\\[!a-]': Precision.FP8, "y": Precision.BF16}
    assert policies[3].microscaling == MicroscalingConfig(32, "floor")
    assert policies[1].microscaling == MicroscalingConfig(16) and policies[1].name == "nvfp4"
    assert PrecisionPolicy(sensitive_layers=["head"]) == PrecisionPolicy(
        sensitive_layers=["lm_head"]
    )
    (tmp_path / "policy.json").write_text("{")
    with pytest.raises(ValueError, match="policy.json: precision policy: .*line 1"):
        PrecisionPolicy.load(tmp_path / "policy.json")


@pytest.mark.parametrize(
    "arguments,options,error,message",
    [
        (["int8"], {}, ValueError, 'default: precision "int8" is not a precision: use fp32, bf16'),
        ([Precision.FP16], {}, UnsupportedError, '"fp16" is not supported: use fp32, bf16, fp8'),
        ([3], {}, TypeError, "default_compute is a int: expected a Precision, its name, or"),
        (["nvfp4", None, MicroscalingConfig()], {}, ValueError, "nvfp4, has blocks of 16"),
        (["fp8", None, MicroscalingConfig()], {}, ValueError, "no operand has blocks of that size"),
        (
            ["mxfp8", None, 32],
            {},
            TypeError,
            "microscaling is a int: expected a MicroscalingConfig",
        ),
        (["mxfp8", "head"], {}, TypeError, r"expected a list, \['head'\]"),
        (["mxfp8", [3]], {}, ValueError, r"sensitive_layers\[0\] is an integer"),
        ([{"forward_x": "fp8"}], {}, ValueError, "default: forward_w is missing; expected it, or"),
        (
            [],
            {"layers": {"h": {"forward": "fp8"}}},
            ValueError,
            'unknown member "forward"; expected',
        ),
        (
            [],
            {"layers": {"h": {"dgrad_w": "e4m3"}}},
            ValueError,
            'dgrad_w: there is no scheme "e4m3"',
        ),
        ([], {"layers": {"h": {"forward_x": "mxfp8+stochastic"}}}, ValueError, "only dgrad_dy and"),
        (
            [{"recipe": "mxfp8", "forward_x": "fp8-block"}],
            {},
            ValueError,
            "forward_x is fp8-block and the other operand of its GEMM is mxfp8; expected fp8-block for both",
        ),
        ([{"recipe": "fp8-block", "dgrad_dy": "fp8-block+stochastic"}], {}, ValueError, "no stoch"),
        ([{"recipe": "fp8-block", "forward_x": "fp8-block+ceil"}], {}, ValueError, "no scale rule"),
        ([], {"bf16_share": 2}, ValueError, "bf16_share is 2; expected 0 to 1"),
        ([], {"fallback": "no"}, ValueError, 'fallback is "no"; expected safe or strict'),
        (["fp8"], {"fast_accumulation": 1}, ValueError, "is an integer; expected true or false"),
    ],
    ids=str,
)
def test_mistakes_are_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        PrecisionPolicy(*arguments, **options)


def test_a_strict_policy_never_falls_back():
    strict = PrecisionPolicy("mxfp8", fallback="strict")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    dw.optimize(model, precision=strict, verbose=False)
    model(torch.randn(3, 8))
    with torch.autograd.graph.save_on_cpu():
        with pytest.raises(
            UnsupportedError, match="the model would run in PyTorch, not in MXFP8: "
        ):
            model(torch.randn(3, 8))
    wide = torch.nn.Linear(8, 8).double()
    with pytest.raises(UnsupportedError, match="float64.*fallback is 'strict': use 'safe'"):
        dw.optimize(wide, precision=strict, verbose=False)
    assert "forward" not in wide.__dict__


def test_names_in_a_model_that_is_captured_in_pieces():
    """A piece's layers have the names of the whole model."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.b(self.a(x).relu())

    class Printing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            print(float(x.sum()))  # cannot be captured
            return self.block(x)

    model = Printing()
    policy = PrecisionPolicy("mxfp8", layers={"block.a": "fp8"})
    dw.optimize(model, precision=policy, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            model(torch.randn(3, 8))
    text = dw.summary(model)
    assert (
        "1 linear layers in FP8, 1 in MXFP8" in text or "1 linear layers in MXFP8, 1 in FP8" in text
    )
    assert "block.a: FP8" in text and "applies to no" not in text


def test_a_copied_model_keeps_its_policy():
    policy = PrecisionPolicy("mxfp8", layers={"0": "fp8"})
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    dw.optimize(model, precision=policy, verbose=False)
    x = torch.randn(3, 8)
    y = model(x)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(x), y)
        assert "0: FP8" in dw.summary(again)


def test_predictions_take_a_policy():
    policy = PrecisionPolicy("fp8", layers={"*.mlp": "bf16"})
    ids = torch.zeros(2, 8, dtype=torch.long)
    arguments = {"input_ids": ids, "labels": ids}
    report = deepwell.dryrun(gpt2("meta"), arguments, target="cpu", precision=policy)
    assert report["precision"] == "fp8"
    assert json.loads(policy.to_json())["default"] == "fp8"
