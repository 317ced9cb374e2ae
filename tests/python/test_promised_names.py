"""Every public name in a minimal use: Python, the program's commands, the C bridge. docs/names.md lists them; its tables
must agree with the package, the program and the library, and its blocks run as a user pastes them."""

import ctypes
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import deepwell as dw
import numpy as np
import pytest
import torch
import train_runs
from deepwell import _deepwell
from test_program import ROOT, commands, find_program

PAGE = ROOT / "docs/names.md"
LIBRARIES = Path(_deepwell.__file__).resolve().parent

# ---- the tables of the page ------------------------------------------------------------------------


def rows() -> list[tuple[list[str], str, str]]:
    """Returns (names, page, test) of each row whose last cell is a test."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 4:
            found.append((re.findall(r"`([^`]+)`", cells[0]), cells[2], cells[3].strip("` |")))
    return found


def names(of: str) -> list[str]:
    """Returns the page's names of a kind: those that begin with `of`."""
    return [name for listed, _, _ in rows() for name in listed if name.startswith(of)]


def resolved(name: str):
    """Returns what a dotted name stands for."""
    parts = name.split(".")
    for at in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:at]))
        except ModuleNotFoundError:
            continue
        # "deepwell.compile" is the function, whose name a module does not have.
        for part in parts[at:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def test_the_page_has_every_public_name():
    listed = set(names("deepwell."))
    assert listed >= {f"deepwell.{name}" for name in dw.__all__}
    from deepwell.kernels import cutlass_bindings, production_kernels

    for module in (cutlass_bindings, production_kernels):
        assert listed >= {f"{module.__name__}.{name}" for name in module.__all__} | (
            {"deepwell.cutlass_kernels"}
        )
    assert {name.split()[1] for name in names("deepwell ")} == set(commands())


@pytest.mark.parametrize("name", names("deepwell."))
def test_the_name_resolves(name):
    assert resolved(name) is not None


def test_the_page_points_to_what_exists():
    seen = 0
    for listed, page, test in rows():
        path, _, part = re.search(r"\(([^)]+)\)", page)[1].partition("#")
        text = (PAGE.parent / path).read_text() if path else PAGE.read_text()
        headings = [h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)]
        assert not part or part in headings, page
        folder = "tests/c" if test.endswith(".c") else "tests/python"
        proof = (ROOT / folder / test).read_text()
        for name in listed:
            last = re.split(r"[. ]", name)[-1]
            assert last in text, f"{path} says nothing of {name}"
            assert re.search(rf"\b{re.escape(last)}\b", proof), f"{test} has no {name}"
            seen += 1
    assert seen > 60
    scripts = re.findall(r"^\| `(\S+\.(?:py|sh))`", PAGE.read_text(), re.M)
    assert len(scripts) == 7 and all((ROOT / script).exists() for script in scripts)


# ---- Python ------------------------------------------------------------------------------------------

# A minimal use of each name of deepwell.__all__, in this order in one namespace: `model`, `batch` and `folder` are given.
USES = {
    "__version__": "assert dw.__version__.count('.') == 2",
    "optimize": "assert dw.optimize(model, verbose=False) is model; model(**batch).loss.backward()",
    "summary": "assert 'LlamaForCausalLM' in dw.summary(model)",
    "restore": "assert dw.restore(model) is model and 'LlamaForCausalLM' not in dw.summary(model)",
    "activate_sdpa": "before = torch.nn.functional.scaled_dot_product_attention; dw.activate_sdpa()",
    "deactivate_sdpa": """
        dw.deactivate_sdpa()
        assert torch.nn.functional.scaled_dot_product_attention is before""",
    "AdamW": "dw.AdamW(model.parameters(), lr=1e-3).step()",
    "Muon": "dw.Muon(model, lr=1e-3).step()",
    "probe": "hw = dw.probe(); assert hw.gpus or hw.cpu['usable'] > 0",
    "hardware": """
        b200 = dw.hardware('b200:8'); gpu = b200.gpus[7]
        assert gpu.compute_capability == (10, 0) and gpu.sm_version == 'sm_100a'
        assert gpu.is_blackwell and gpu.blackwell_variant == 'sm_100'
        assert gpu.supports_mxfp8 and gpu.supports_fp4 and gpu.name == 'b200'
        assert gpu.memory_gb * 10**9 == gpu.memory_gib * 2**30 and gpu.memory_bandwidth_gb_s == 7700
        assert b200.nvlink.bandwidth_gb_s == 900 and b200.links == []""",
    "Hardware": "assert isinstance(hw, dw.Hardware) and json.loads(hw.to_json())['gpus'] == hw.gpu_count",
    "print_hardware_info": "dw.print_hardware_info(b200)",
    "capture": "ir = dw.capture(model, batch)",
    "IR": "assert isinstance(ir, dw.IR) and '[211, 64]' in str(ir)",
    "autoplan": """
        plan = dw.autoplan(ir, hw=b200, seq_len=64, global_batch=64, arch='blackwell-sm100',
                           moe={'experts': 8, 'capacity_factor': 1.25}, precision='mxfp8')
        assert plan.layout.precision == 'mxfp8' and plan.memory_gb * 10**9 == plan.memory_gib * 2**30""",
    "Plan": """
        plan.save('plan.json')
        assert dw.Plan.load('plan.json').to_json() == plan.to_json()""",
    "HostPlan": """
        host = dw.autoplan(model, hw={'name': 'host', 'gpus': 0, 'host_memory': 8e9}, seq_len=8, global_batch=4)
        assert isinstance(host, dw.HostPlan) and host.layout.micro_batch == 4
        assert host.step_time_ms is None and host.mfu is None""",
    "compile": "engine = dw.compile(ir, plan=plan, precision='mxfp8', fallback='safe')",
    "Engine": "assert isinstance(engine, dw.Engine); engine(**batch).loss.backward()",
    "CompiledOp": """
        op = engine.compiled_ops[0]
        assert isinstance(op, dw.CompiledOp) and op.op and op.kernel and op.precision and op.stream_id == 0
        assert op.measured_ms is None; op.backend_op(); op.backend_op.release()""",
    "dryrun": """
        report = dw.dryrun(engine)
        assert {'memory_gb', 'step_time_ms', 'expected_speedup', 'baseline', 'bubble_fraction', 'mfu', 'overlap', 'fits',
                'trace'} <= set(report) and isinstance(report['expected_speedup'], float)
        assert dw.dryrun(plan, trace='trace.json')['trace'] == 'trace.json'""",
    "optimize_for_blackwell": """
        engine = dw.optimize_for_blackwell(model, precision='mxfp8', seq_len=16, batch_size=2)
        assert engine.plan.layout.gpus == 1 and dw.dryrun(engine)['memory_gb'] > 0""",
    "Trainer": """
        trainer = dw.Trainer.from_engine(engine, optimizer='adamw_dw', dataloader=[batch] * 2, elastic=True, progress=False)
        assert trainer.fit().steps == 2; trainer.save('trained')""",
    "export": "artifact = dw.export(engine, path='model.engine')",
    "load_engine": "assert dw.load_engine('model.engine').config['vocab_size'] == 211",
    "Artifact": "assert isinstance(artifact, dw.Artifact) and artifact.generate(torch.tensor([[1, 2]]), 3).shape == (1, 5)",
    "Precision": """
        assert [p.name for p in dw.Precision] == 'FP32 FP16 BF16 FP8 FP8_BLOCK MXFP8 MXFP6 MXFP4 NVFP4'.split()
        assert dw.Precision.MXFP8.bits == 8 and dw.Precision.NVFP4.bits == 4
        assert dw.Precision.MXFP8.is_microscaled and not dw.Precision.FP8.requires_blackwell""",
    "MicroscalingConfig": "blocks = dw.MicroscalingConfig(block_size=32)",
    "PrecisionPolicy": """
        policy = dw.PrecisionPolicy(default_compute=dw.Precision.MXFP8, sensitive_layers=['embedding', 'final_linear'],
                                    microscaling=blocks)
        dw.compile(ir, precision=policy)""",
    "PrecisionGuard": "guarded = dw.PrecisionPolicy('mxfp8', guard=dw.PrecisionGuard(every=2))",
    "sample_precision": """
        dw.optimize(model, precision=guarded, verbose=False)
        with dw.sample_precision(model) as sample:
            model(**batch).loss.backward()
        assert min(operand.snr_db for operand in sample.report()) > 0""",
    "accumulate": """
        with dw.accumulate(model):
            for _ in range(2):
                (model(**batch).loss / 2).backward()""",
    "checkpoints": """
        dw.checkpoints.to_distributed('trained', 'sharded')
        assert 'step 2' in str(dw.checkpoints.from_distributed('sharded', 'whole'))""",
    "parity": """
        small = torch.nn.Sequential(torch.nn.Embedding(101, 8), torch.nn.Linear(8, 101))
        rows = [{'x': x} for x in torch.randint(0, 101, (3, 4, 9))]
        result = dw.parity(small, rows, ['mxfp8'], 2, held_out=rows[:1], progress=False,
                           loss_fn=lambda model, batch: torch.nn.functional.cross_entropy(
                               model(batch['x'][:, :-1]).flatten(0, 1), batch['x'][:, 1:].flatten()))""",
    "ParityResult": "assert isinstance(result, dw.ParityResult) and result.verdict in ('within', 'apart')",
    "numbers": "assert dw.numbers.decode(dw.numbers.encode(torch.tensor([1.0]), 'e4m3'), 'e4m3') == 1",
    "BlackwellConfig": """
        config = dw.BlackwellConfig(use_flash_attention=True, use_pytorch_fallback=False, enable_profiling=False)""",
    "BlackwellFlashAttention": """
        q = torch.randn(1, 2, 8, 16, requires_grad=True)
        dw.BlackwellFlashAttention(config).forward(q, q, q, causal=False).sum().backward()""",
    "DWSelfAttention": "assert dw.DWSelfAttention(16, 4, config)(torch.randn(2, 5, 16))[0].shape == (2, 5, 16)",
    "DeepwellMoE": """
        moe = dw.DeepwellMoE(64, 256, num_experts=8, top_k=2, capacity_factor=1.25)
        assert moe(torch.randn(2, 5, 64)).shape == (2, 5, 64)
        assert sum(moe.statistics()['tokens']) == 20""",
    "DeepwellError": """
        with pytest.raises(dw.DeepwellError, match='abacus'):
            dw.hardware('abacus:8')
        with pytest.raises(dw.DeepwellError, match='nothing.bin'):
            dw.Trainer(model, ['nothing.bin'], sequence=16, batch=2, steps=1)""",
    "UnsupportedError": """
        with pytest.raises(dw.UnsupportedError, match='sm_70'):
            dw.optimize(model, target='sm_70')""",
    "CaptureError": """
        with pytest.raises(dw.CaptureError, match='example_inputs'):
            dw.capture(torch.nn.Bilinear(2, 2, 2))""",
    "DivergenceError": """
        with pytest.raises(dw.DivergenceError):
            dw.Trainer(torch.nn.Linear(2, 2), [torch.full((2, 2), float('inf'))], progress=False,
                       loss_fn=lambda model, batch: model(batch).sum()).fit()""",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and tokens, as the page's commands name them."""
    folder = tmp_path_factory.mktemp("names")
    train_runs.save_model(folder / "model", "llama")
    train_runs.save_tokens(folder / "tokens.bin", train_runs.random_tokens(2000))
    return folder


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=211, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


def test_every_name_in_use(place, tmp_path, monkeypatch):
    assert set(USES) == set(dw.__all__)
    monkeypatch.chdir(tmp_path)
    ids = torch.randint(0, 211, (2, 16))
    names = {
        "dw": dw, "torch": torch, "json": json, "pytest": pytest, "folder": place, "model": llama(),
        "batch": {"input_ids": ids, "labels": ids},
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, use in USES.items():
            assert name in use
            try:
                exec(compile(textwrap.dedent(use).strip(), name, "exec"), names)
            except Exception as error:
                raise AssertionError(f"the use of {name} failed: {error!r}") from error


def test_codes_without_scales_are_refused():
    from deepwell.kernels.cutlass_bindings import CutlassKernel, MicroscaleManager

    codes, _ = MicroscaleManager.quantize_mxfp8(torch.randn(8, 32))
    kernel = CutlassKernel().initialize(8, 8, 32, "mxfp8")
    with pytest.raises(TypeError, match=r"pass both as a pair, \(codes, scales\)"):
        kernel.gemm(codes, codes)


def test_an_engine_names_a_plan_in_another_precision(monkeypatch):
    plan = dw.autoplan("llama3-8b", hw="b200:1", seq_len=64, global_batch=8, what_ifs=False)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with pytest.warns(UserWarning, match="for bf16 GEMMs and the engine has mxfp8"):
        engine = dw.compile(model, plan, precision=dw.Precision.MXFP8)
    assert any("precision='mxfp8'" in note for note in engine.notes)
    assert dw.compile(model, plan, precision="bf16").notes == []


# ---- the page's blocks -------------------------------------------------------------------------------


def test_the_blocks_run(place, monkeypatch, capsys):
    """Runs the Python blocks in one namespace, and the commands in a shell's words."""
    page = PAGE.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 8
    monkeypatch.chdir(place)
    names: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "Expected speedup: " in printed and "sm_efficiency not measured" in printed
    lines = re.findall(r"^\$ (.*)$", page, re.M)
    assert len(lines) == 10
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "deepwell"
        ended = deepwell(*words[1:], cwd=place)
        assert ended.returncode == 0, (line, ended.stdout, ended.stderr)
        assert ended.stdout and "\033" not in ended.stdout
    for file in ("plan.json", "trace.json", "report.html", "small.engine", "trained/manifest.json"):
        assert (place / file).stat().st_size > 0


# ---- the program ---------------------------------------------------------------------------------------


def deepwell(*words, **options) -> subprocess.CompletedProcess[str]:
    """Runs the program with this interpreter as its Python."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [find_program(), *map(str, words)],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "python"), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )


# Requests that every machine answers alike, with the exit status. Tests of their own cover the commands that start
# Python.
IN_PYTHON = {"bench", "parity", "reshard"}
STATUSES = [
    (["doctor", "--json"], 0),
    (["probe", "--json"], 0),
    (["probe", "--hardware", "b200:64", "--json"], 0),
    (["plan", "--model", "gpt2", "--hardware", "b200:8", "--seq-len", 64, "--global-batch", 8, "--json"], 0),
    (["plan", "--model", "llama3-405b", "--hardware", "b200:8", "--seq-len", 8192, "--global-batch", 8, "--json"], 1),
    (["plan", "--model", "abacus", "--hardware", "b200:8", "--seq-len", 64, "--global-batch", 8], 1),
    (["explain", "gemm", "64,64,64,mxfp8", "--target", "sm_100a", "--json"], 0),
    (["explain", "attention", "1,8,128,64", "--target", "sm_90a", "--json"], 0),
    (["explain", "kernels", "--json"], 0),
    (["train", "--model", "model", "--data", "tokens.bin", "--dry-run", "--sequence", 16, "--json"], 0),
    (["train", "--model", "model", "--data", "nothing.bin", "--output", "out"], 1),
    (["train", "--model", "model", "--data", "tokens.bin", "--output", "out", "--device", "abacus"], 2),
    (["dryrun", "--plan", "nothing.json"], 1),
    (["export", "--checkpoint", "model", "-o", "status.engine", "--json"], 0),
    (["run", "status.engine", "--tokens", "1,2", "--max-tokens", 2, "--json"], 0),
    (["run", "nothing.engine"], 1),
    (["emulate"], 2),
    (["graph", "nothing", "--json"], 1),
]  # fmt: skip


@pytest.mark.parametrize(("words", "status"), STATUSES, ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else "")  # fmt: skip
def test_exit_statuses(place, words, status):
    ended = deepwell(*words, cwd=place)
    assert ended.returncode == status, (ended.stdout, ended.stderr)
    if "--json" in words and (ended.stdout or status == 0):
        for part in ended.stdout.splitlines() if words[0] == "train" else [ended.stdout]:
            json.loads(part)
    if status > 0 and words[0] != "plan":
        assert ended.stdout == "" and ended.stderr.startswith("deepwell")


def test_every_command_has_help_usage_and_completion():
    """Help ends with 0, an unknown option with 2, and bash completes every option that help lists."""
    completion = (ROOT / "cli/completion/deepwell.bash").read_text()
    cases = dict(re.findall(r"^    (\w+)\)(.*?);;", completion, re.M | re.S))
    assert {words[0] for words, _ in STATUSES} == set(commands()) - IN_PYTHON
    for command in commands():
        told = deepwell(command, "--help")
        assert told.returncode == 0 and told.stdout.startswith(f"Usage: deepwell {command}")
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", told.stdout))
        options -= {"--compress-mode"}  # of nvcc, in the text of `emulate`
        missing = [option for option in options if option not in cases[command]]
        assert not missing, f"completion of {command} lacks {missing}"
        if command in IN_PYTHON:
            continue
        wrong = deepwell(command, "--no-such-option")
        assert wrong.returncode == 2 and wrong.stdout == "" and "--no-such-option" in wrong.stderr


def test_the_front_of_make_cutlass():
    ended = subprocess.run([ROOT / "build_cutlass.sh", "--help"], capture_output=True, text=True)
    assert ended.returncode == 0 and ended.stdout.startswith("Usage: scripts/cutlass.sh")


# ---- C -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names("dw_"))
def test_the_symbol_is_declared_and_exported(name):
    headers = "".join(path.read_text() for path in (ROOT / "include/deepwell").glob("*.h"))
    assert re.search(rf"^DW_API .*\b{name}\(", headers, re.M)
    assert getattr(ctypes.CDLL(LIBRARIES / "libdeepwell.so"), name)


# Attention by both libraries on device memory, as a program calls it that knows pointers alone. It prints the results.
BRIDGE = """
import ctypes, sys
import numpy as np

cuda = ctypes.CDLL("libcuda.so.1")
count, context = ctypes.c_int(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
data = np.load("in.npz")
B, H, Q, D = data["q"].shape
K = data["k"].shape[2]

def memory(codes):
    pointer = ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(codes.nbytes)) == 0
    assert cuda.cuMemcpyHtoD_v2(pointer, codes.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(codes.nbytes)) == 0
    return pointer

out = {}
q, k, v = (memory(data[name]) for name in "qkv")
for at, path in enumerate(sys.argv[1:]):
    library = ctypes.CDLL(path)
    library.dw_fmha_bf16_forward.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int] * 6
    for causal in (0, 1):
        o = memory(np.full_like(data["q"], 0x7FC0))
        status = library.dw_fmha_bf16_forward(q.value, k.value, v.value, o.value, B, H, Q, K, D, causal)
        assert status == 0, status
        made = np.empty_like(data["q"])
        assert cuda.cuMemcpyDtoH_v2(made.ctypes.data_as(ctypes.c_void_p), o, ctypes.c_size_t(made.nbytes)) == 0
        out[f"{at}{causal}"] = made
    bad = library.dw_fmha_bf16_forward(q.value, k.value, v.value, o.value, B, H, Q, K, 0, 0)
    assert bad != 0
np.savez("out.npz", **out)
"""


def test_the_bridge_on_an_emulated_gpu(tmp_path):
    """dw_fmha_bf16_forward of libdeepwell.so and libdw_fmha_bridge_min.so against FP64."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, rows, 64).bfloat16() for rows in (72, 136, 136))
    codes = {name: x.view(torch.uint16).numpy() for name, x in zip("qkv", (q, k, v))}
    np.savez(tmp_path / "in.npz", **codes)
    (tmp_path / "bridge.py").write_text(BRIDGE)
    paths = [LIBRARIES / "libdeepwell.so", LIBRARIES / "libdw_fmha_bridge_min.so"]
    ended = subprocess.run(
        [find_program(), "emulate", "--", sys.executable, "bridge.py", *paths],
        env={**os.environ, "DEEPWELL_FIRST_USE_CHECK": "off"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "nvrtc" in ended.stderr.lower():
        pytest.skip("the kernels were not compiled into this build, and there is no compiler")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    made = np.load(tmp_path / "out.npz")
    scores = q.double() @ k.double().mT / 8
    for causal in (0, 1):
        # The last query sees the last key.
        hidden = torch.ones(72, 136, dtype=torch.bool).triu(136 - 72 + 1) & bool(causal)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = weights @ v.double()
        # P and O are rounded to BF16, 2^-9 of their magnitude each; 2^-20 is for sums and exponentials in FP32.
        bound = 2.0**-8 * (weights @ v.double().abs()) + 2.0**-9 * expected.abs() + 2.0**-20
        for library in (0, 1):
            found = torch.from_numpy(made[f"{library}{causal}"]).view(torch.bfloat16).double()
            assert ((found - expected).abs() <= bound).all()
