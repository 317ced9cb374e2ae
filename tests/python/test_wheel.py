"""The wheel for other machines: it needs only the C library and PyTorch, and trains."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from elf import check_run_paths, dynamic, is_elf

ROOT = Path(__file__).parents[2]
# libraries of the C library, which every machine has
SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}

TRAIN = """
import json, torch, deepwell
torch.manual_seed(0)

def losses(optimized):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(24, 96), torch.nn.GELU(), torch.nn.Linear(96, 7))
    if optimized:
        model = deepwell.optimize(model, verbose=False)
    optimizer = (deepwell.AdamW if optimized else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    found = []
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, deepwell.summary(model) if optimized else ""

x, y = torch.randn(32, 24), torch.randint(0, 7, (32,))
plain, (ours, summary) = losses(False)[0], losses(True)
print(json.dumps({"file": deepwell.__file__, "plain": plain, "ours": ours, "summary": summary}))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Makes a fresh virtual environment with only the wheel installed, which sees the PyTorch of
    this one."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    defines = ("DEEPWELL_STATIC_DEPS=ON", "DEEPWELL_ONEDNN=OFF", "DEEPWELL_CUBINS=OFF")
    options = ["-C", f"build-dir={folder / 'build'}"]
    for define in defines:  # without compiled GPU kernels, which take minutes and link nothing
        options += ["-C", f"cmake.define.{define}"]
    command = [*pip, "wheel", ROOT, "--no-deps", "--no-index", "--no-build-isolation", *options]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    built = subprocess.run(
        [*map(str, command), "-w", str(folder)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    assert "-cp310-abi3-linux_" in wheel.name  # one for all versions of Python from 3.10 on
    made = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True, timeout=300)
    (packages,) = (made / "lib").glob("python3*/site-packages")
    # Path files of that folder have no effect, so that the sources are not found.
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [*pip, "--python", made / "bin" / "python", "install", "--no-index", "--no-deps"]
    subprocess.run([*map(str, install), str(wheel)], check=True, capture_output=True, timeout=300)
    return made, packages / "deepwell"


def run(command: list, elsewhere: Path) -> str:
    own = {"HOME": str(elsewhere), "OMP_NUM_THREADS": "1", "DEEPWELL_MEASURE": "0"}
    result = subprocess.run(
        list(map(str, command)),
        cwd=elsewhere,
        env={"PATH": os.environ["PATH"], **own},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_libraries_need_the_c_library_alone(environment):
    made, package = environment
    files = [path for path in package.rglob("*") if is_elf(path)] + [made / "bin" / "deepwell"]
    names = {file.name for file in files}
    assert {"libdeepwell.so", "_deepwell.abi3.so", "libcuda.so.1", "deepwell"} <= names
    assert "libdeepwell_emulator.so" in names
    check_run_paths(files)
    for file in files:
        found = dynamic(file)
        assert all(folder.startswith("$ORIGIN") for folder in found.run_path), file
        others = {name for name in found.needed if not name.startswith("ld-linux")}
        assert others <= SYSTEM | names, f"{file} needs {sorted(others - SYSTEM - names)}"


@pytest.mark.slow
def test_licences_of_what_is_inside_go_along(environment):
    _, package = environment
    for name in ("jansson", "xxhash"):
        notice = Path(f"/usr/share/doc/lib{name}-dev/copyright")
        if not notice.exists():
            pytest.skip(f"this machine has no {notice}")
        assert (package / "licenses" / f"{name}.txt").read_text() == notice.read_text()


@pytest.mark.slow
def test_models_train_in_an_empty_environment(environment, tmp_path):
    made, package = environment
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    report = json.loads(run([made / "bin" / "python", script], tmp_path).splitlines()[-1])
    assert Path(report["file"]).parent == package
    assert "[model]" in report["summary"], report["summary"]
    assert report["ours"][-1] < report["ours"][0]
    # FP32 sums of at most 96 terms in another order, over four steps of AdamW.
    assert report["ours"] == pytest.approx(report["plain"], rel=1e-4)


@pytest.mark.slow
def test_the_program_runs_in_an_empty_environment(environment, tmp_path):
    made, package = environment
    assert run([made / "bin" / "deepwell", "--version"], tmp_path).startswith("deepwell ")
    listed = run([made / "bin" / "deepwell", "emulate", "--", "/usr/bin/env"], tmp_path)
    assert f"LD_LIBRARY_PATH={(package / 'emulate').resolve()}" in listed.splitlines()
