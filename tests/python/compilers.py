"""Marks for tests whose kernels are compiled when they are first used."""

import re

import pytest
from deepwell import _deepwell


def _version() -> tuple[int, ...]:
    """Returns the version of the compiler that this process finds; (0, 0) if there is none."""
    found = re.search(r"(\d+)\.(\d+)", _deepwell.jit_compiler() or "")
    return tuple(map(int, found.groups())) if found else (0, 0)


needs_compiler = pytest.mark.skipif(_version() == (0, 0), reason="kernels need NVRTC")
needs_blackwell_compiler = pytest.mark.skipif(
    _version() < (12, 9), reason="kernels for Blackwell need NVRTC 12.9"
)
