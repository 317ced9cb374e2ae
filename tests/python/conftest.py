import collections
import functools
import os
import signal
import sys
import textwrap

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# On emulated GPUs, too, linear layers and the programs behind them are separate, as where there is cuBLASLt: the sources
# of both together take seconds each. tests/c/test_engine_gpu.c compares plans with and without.
os.environ.setdefault("DEEPWELL_EPILOGUES", "off")
# A shell that starts the tests in the background makes them, and the programs that they start,
# ignore SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import deepwell  # noqa: E402
from attention_tools import served_on_cpu  # noqa: E402
from deepwell import _deepwell  # noqa: E402
from deepwell.targets import EMULATED  # noqa: E402
from users import Support  # noqa: E402


def pytest_generate_tests(metafunc):
    """Tests of users' behaviours run on the CPU and on an emulated GPU."""
    if metafunc.definition.get_closest_marker("support") is None:
        return
    slow = metafunc.definition.get_closest_marker("slow_emulated") is not None
    emulated = pytest.param(EMULATED[0], marks=[pytest.mark.slow] if slow else [])
    metafunc.parametrize("_target", [None, emulated], ids=["cpu", "gpu"], indirect=True)


@pytest.fixture(autouse=True)
def _target(request, monkeypatch):
    """The target of models for which a test of users' behaviours names none."""
    target = getattr(request, "param", None)
    if target is None:
        return
    if target in EMULATED and not _deepwell.jit_compiler():
        pytest.skip("elementwise programs need NVRTC")
    monkeypatch.setattr(deepwell, "optimize", functools.partial(deepwell.optimize, target=target))


@pytest.fixture
def always(monkeypatch):
    """Engines run even if they measure slower, so that the engine is tested."""
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")


@pytest.fixture
def attention_on_cpu():
    """Runs Deepwell's attention operators on CPU tensors, by definition."""
    with served_on_cpu():
        yield


@pytest.fixture
def support(request, always):
    """Reports how a marked test's behaviour is served; see users.py."""
    mark = request.node.get_closest_marker("support")
    assert mark is not None, "mark the test: support(area, behaviour, served, because)"
    stated = Support(*mark.args, **mark.kwargs)
    yield stated
    assert stated.checked, "the test did not ask how the model was served"


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)
    yield


def pytest_terminal_summary(terminalreporter):
    """Prints the 15 slowest tests and files, with the time of fixtures, in a few lines."""
    tests, files = collections.Counter(), collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                name = report.nodeid.removeprefix("tests/python/")
                tests[name] += report.duration
                files[name.partition("::")[0]] += report.duration
    for what, seconds in (("tests", tests), ("files", files)):
        slowest = [f"{name}\u00a0{time:.1f}" for name, time in seconds.most_common(15) if time >= 1]
        if not slowest:
            continue
        terminalreporter.write_line(f"slowest Python {what} (s):")
        lines = textwrap.wrap(
            ", ".join(slowest), 118, break_long_words=False, break_on_hyphens=False
        )
        for line in lines:
            terminalreporter.write_line("  " + line.replace("\u00a0", " "))
