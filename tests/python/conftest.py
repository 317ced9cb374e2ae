import os
import signal
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell that starts the tests in the background has them ignore SIGINT, and the programs that they start as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


from users import Support  # noqa: E402


@pytest.fixture
def support(request, monkeypatch):
    """How a marked test's behaviour is served; see users.py. Engines run even where they are slower."""
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")
    mark = request.node.get_closest_marker("support")
    assert mark is not None, "mark the test: support(area, behaviour, served, because)"
    stated = Support(*mark.args, **mark.kwargs)
    yield stated
    assert stated.checked, "the test did not ask how the model was served"


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)
    yield
