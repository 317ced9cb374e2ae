"""NVRTC is found in the folder of the running Python, whichever python3 is on PATH."""

import glob
import os
import subprocess
import sys
import sysconfig

import pytest

LIBRARIES = glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/*/lib/libnvrtc.so.1[23]")


@pytest.mark.skipif(not LIBRARIES, reason="this Python has no NVRTC")
def test_nvrtc_is_found_in_the_running_pythons_folder():
    code = "import deepwell, deepwell.attention; print(deepwell._deepwell.jit_compiler())"
    bare = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "CUDA_HOME")}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**bare, "PATH": "/nowhere", "DEEPWELL_NVRTC": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("NVRTC 1"), run.stdout
