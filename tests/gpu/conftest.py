"""Tests that need an NVIDIA GPU:

    PYTHONPATH=python python3 -m pytest -q tests/gpu

DEEPWELL_TEST_DEVICE=cpu runs those that can be run on the CPU, by definition: a check of the tests, not of kernels.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "python")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["DEEPWELL_AUTOTUNE"] = "0"  # our kernels are tested even if others are faster

_ON_CPU = os.environ.get("DEEPWELL_TEST_DEVICE") == "cpu"


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if not _ON_CPU and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _settled():
    torch.manual_seed(0)
    from deepwell.attention import functional

    if _ON_CPU:
        functional.devices.add("cpu")
    functional.forget()
    functional.fallbacks.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def device():
    return torch.device("cpu" if _ON_CPU else "cuda")


@pytest.fixture
def gpu(device):
    """Skips tests of features that the CPU does not have."""
    if device.type != "cuda":
        pytest.skip("needs an NVIDIA GPU")
    return device
