"""The C operators on CPU tensors, with reference attention in libdeepwell's place."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_operators_translate_every_argument(tmp_path):
    library = tmp_path / "definition.so"
    source = _HERE / "attention_by_definition.c"
    flags = ["-O1", "-shared", "-fPIC", f"-I{_ROOT / 'include'}", "-Wall", "-Werror"]
    subprocess.run(["cc", *flags, str(source), "-o", str(library), "-lm"], check=True)
    path = os.pathsep.join([str(_ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ, LD_PRELOAD=str(library), PYTHONPATH=path)
    script = _HERE / "attention_native_run.py"
    run = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0 and "all right" in run.stdout, run.stdout + run.stderr
