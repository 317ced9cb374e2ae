"""`deepwell explain`, and the C bridge's own library, as a user calls them on a machine without a GPU."""

import ctypes
import json
import subprocess
from pathlib import Path

import program
import pytest
from deepwell import _deepwell

LIBRARIES = Path(_deepwell.__file__).resolve().parent


def explain(*arguments, cache):
    """Runs without the optional kernels of `make cutlass`, wherever they are built."""
    return program.run("explain", *arguments, DEEPWELL_CACHE=str(cache), DEEPWELL_CUTLASS="none")


def report(*arguments, cache):
    run = explain("attention", *arguments, "--target", "sm_90a", "--json", cache=cache)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_backend_and_reason_are_shown(tmp_path):
    plain = report("8,16,2048,128,causal", cache=tmp_path)
    assert plain["chosen"] == "deepwell"
    assert [c["name"] for c in plain["candidates"]] == [
        "deepwell",
        "cudnn",
        "flash",
        "efficient",
        "math",
    ]
    assert all(c["runs"] for c in plain["candidates"])
    # 4 B H D operations for each of the S (S + 1) / 2 pairs.
    assert plain["flops"] == 4 * 8 * 16 * 128 * 2048 * 2049 / 2
    capped = report("8,16,2048,128,softcap=30,kv=4,f16", "--backward", cache=tmp_path)
    assert "soft cap" in capped["shape"] and "16 query heads on 4" in capped["shape"]
    assert capped["operation"] == "attention backward"
    assert [c["name"] for c in capped["candidates"] if c["runs"]] == ["deepwell"]
    assert all(c["reason"] for c in capped["candidates"] if not c["runs"])
    odd = report("1,2,30,100,k=50", cache=tmp_path)
    assert odd["chosen"] == "math" and "head_dim is 100" in odd["candidates"][0]["reason"]


def test_explanation_as_text(tmp_path):
    run = explain("attention", "2,8,512,64,window=128:0,dropout=0.1", cache=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "Chosen: deepwell" in run.stdout
    assert "a window is an arbitrary mask" in run.stdout
    if (
        subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout.find(
            "libcuda.so.1"
        )
        < 0
        and not Path("/dev/nvidia0").exists()
    ):
        assert "No GPU here: there is no NVIDIA driver" in run.stdout
        measured = explain("attention", "2,8,512,64", "--measure", cache=tmp_path)
        assert measured.returncode == 3 and "NVIDIA driver" in measured.stderr


def test_another_gpus_figures_are_not_measurements(tmp_path):
    """Without such a GPU the output names an H200's rates at sm_90a, and marks scaled ones as estimates in
    text and JSON.
    """
    shape = "2,8,512,64"
    for target, kind in (
        ("sm_90a", "measured"),
        ("sm_100a", "estimated"),
        ("sm_103a", "estimated"),
    ):
        run = explain("attention", shape, "--target", target, "--json", cache=tmp_path)
        rows = {row["name"]: row for row in json.loads(run.stdout)["candidates"]}
        assert rows["cudnn"]["expected_kind"] == kind
        assert rows["cudnn"]["measured_seconds"] is None
        words = explain("attention", shape, "--target", target, cache=tmp_path).stdout
        (line,) = (line for line in words.splitlines() if line.startswith("cudnn"))
        time = f"{1e6 * rows['cudnn']['expected_seconds']:.1f} us"
        if kind == "measured":
            assert f" {time}" in line and "NVIDIA H200" in line
        else:
            assert f"~{time}" in line and "estimate, not measured" in line
        (line,) = (line for line in words.splitlines() if line.startswith("math"))
        assert "~" in line  # estimated, not measured, on any GPU
    assert "Work: 1.1 GFLOP, 4.2 MB" in words  # 4 * 2 * 8 * 512^2 * 64, and four tensors of 2 bytes


@pytest.mark.parametrize(
    "arguments, status, part",
    [
        ((), 2, "explain supports attention, gemm and kernels"),
        (("matmul", "1,2,3,4"), 2, "not matmul"),
        (("attention",), 2, "needs a shape"),
        (("attention", "1,2,3"), 2, "at least B,H,S,D"),
        (("attention", "1,2,3,x"), 2, "'x' is not what explain expects as word 4"),
        (("attention", "1,2,3,64,casual"), 2, "'casual'"),
        (("attention", "1,2,3,64,window=5"), 2, "'window=5'"),
        (("attention", "1,2,3,64", "--target"), 2, "--target needs a value"),
        (("attention", "1,2,3,64", "--targte", "x"), 2, "unknown argument '--targte'"),
        (("attention", "1,2,3,64", "5,6,7,8"), 2, "unknown argument '5,6,7,8'"),
        (("attention", "1,2,-3,64"), 1, "seq_len_q is -3"),
        (("attention", "1,2,3,64,kv=3"), 1, "heads_q is 2 and heads_kv is 3"),
        (("attention", "1,2,3,64", "--target", "sm_42"), 1, 'target "sm_42" is not known'),
        (("gemm",), 2, "needs a shape, M,N,K"),
        (("gemm", "1,2"), 2, "at least M,N,K"),
        (("gemm", "1,2,3,relu"), 2, "'relu' is not what explain expects as word 4"),
        (("gemm", "1,2,3", "--measure"), 2, "unknown argument '--measure'"),
        (("gemm", "1,-2,3"), 1, "n is -2"),
        (("kernels", "x"), 2, "unknown argument 'x'"),
    ],
)
def test_invalid_calls_are_rejected(arguments, status, part, tmp_path):
    run = explain(*arguments, cache=tmp_path)
    assert run.returncode == status
    assert part in run.stderr


UNPROVEN = "proven on the emulator, not run on hardware"


def test_gemm_states_its_proof(tmp_path):
    """Blackwell's kernels are described by their proof, and none is used by default."""
    run = explain(
        "gemm", "8192,8192,8192,bias,gelu", "--target", "sm_100a", "--json", cache=tmp_path
    )
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout)
    ours, theirs, cutlass = plan["candidates"]
    assert cutlass["name"] == "cutlass" and (cutlass["runs"] or cutlass["reason"])
    assert plan["chosen"] == "cublas" and UNPROVEN in plan["because"]
    assert ours["runs"] and ours["proof"] == UNPROVEN and ours["measured_seconds"] is None
    assert "nothing measured" in ours["expected_from"]
    assert ours["tile"]["ctas"] == 2 and ours["tile"]["tile_n"] == 256
    assert plan["flops"] == 2 * 8192**3
    # The estimate counts whole rounds on 74 pairs at the data sheet's rate.
    rounds = -(-32 * 32 // 74)
    assert ours["tile"]["rounds"] == rounds
    least = rounds * 128 * 512 / (2250e12 / 148 / 8192)
    assert ours["expected_seconds"] == pytest.approx(least, rel=1e-12)
    scaled = explain(
        "gemm", "8192,8192,8192,nvfp4,to-mxfp8", "--target", "sm_100a", "--json", cache=tmp_path
    )
    plan = json.loads(scaled.stdout)
    ours, theirs, cutlass = plan["candidates"]
    assert plan["chosen"] == "deepwell" and not theirs["runs"] and theirs["reason"]
    assert "nvfp4 x nvfp4 to mxfp8" in plan["shape"]
    # 256 elements of K per step, four times the operations of BF16.
    assert ours["tile"]["steps"] == 32 and ours["tile"]["step_clocks"] == 512
    assert plan["bytes"] == 2 * 8192 * (4096 + 512) + 8192 * (8192 + 256)
    gated = explain(
        "gemm", "64,64,64,f16,f32,swiglu,residual", "--target", "sm_103a", cache=tmp_path
    )
    assert "f16 to f32, swiglu, residual" in gated.stdout and UNPROVEN in gated.stdout
    hopper = explain("gemm", "64,64,64", "--target", "sm_90a", cache=tmp_path)
    assert "tested and measured on an H200" in hopper.stdout


# Kernels of the graph's operations: no GPU has run their present code.
_OF_GRAPHS = (
    "softmax", "norm", "cross_entropy", "attention", "attention_backward", "gemm", "elementwise",
    "move", "reduce", "gather", "matmul", "scan", "sort", "graph_quantize", "scatter",
    "linear_cross_entropy", "rope", "quantize_tensor", "quantize_tiles", "multiply_codes", "gemm_scaled",
    "quantization_error", "fp8_block_codes", "fp8_block_gemm", "group_rows", "segment_linear",
    "spread_rows",
)  # fmt: skip


# Kernels that no H200 has run.
_EMULATED_ALONE = (
    "matmul", "scan", "sort", "graph_quantize", "gemm", "multiply_codes", "quantize_tiles", "quantization_error",
    "fp8_block_gemm", "segment_linear", "sm90_linear_program", "sm90_segment_program",
)  # fmt: skip


def test_gemm_on_an_rtx_gpu(tmp_path):
    run = explain("gemm", "8192,8192,8192,nvfp4", "--target", "sm_120a", cache=tmp_path)
    assert "tiles of 128 x 128 (a block each), 4096 of them in 25 rounds of 32 steps" in run.stdout
    assert UNPROVEN in run.stdout and "for sm_100f" not in run.stdout


def test_kernels_state_their_proof(tmp_path):
    run = explain("kernels", "--json", cache=tmp_path)
    kernels = {row["name"]: row for row in json.loads(run.stdout)}
    assert "has trained whole models with it" in kernels.pop("cublaslt")["proof"]
    for name in ("cublaslt_scaled", "cublaslt_fp8_block"):
        assert "not run on hardware" in kernels.pop(name)["proof"]
    for name, row in kernels.items():
        on_blackwell = "sm_1" in row["architectures"]
        assert (UNPROVEN in row["proof"]) == (on_blackwell or name in _OF_GRAPHS), name
        on_h200 = "sm_90a" in row["architectures"] and name not in _EMULATED_ALONE
        assert ("on an H200" in row["proof"]) == on_h200, name
        for source in row["source"].split(", "):
            assert (Path(__file__).parents[2] / source).is_file()
    assert "on request" in kernels["sm100_gemm"]["use"]
    words = explain("kernels", cache=tmp_path).stdout
    assert words.count(UNPROVEN) == sum(UNPROVEN in row["proof"] for row in kernels.values())


def test_bridge():
    """The function is found under the documents' name; without a GPU it gives a status, not a crash."""
    bridge = ctypes.CDLL(str(LIBRARIES / "libdw_fmha_bridge_min.so"))
    function = bridge.dw_fmha_bf16_forward
    function.restype = ctypes.c_int
    pointers = [ctypes.c_void_p(None)] * 4
    shape = [ctypes.c_int(n) for n in (1, 2, 16, 16, 0, 1)]
    assert function(*pointers, *shape) == 2  # DW_SHAPE: a head has no elements
    shape[4] = ctypes.c_int(64)
    assert function(*pointers, *shape) == 1  # DW_INVALID_ARGUMENT: q is NULL
