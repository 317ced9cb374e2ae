"""Deepwell: transformer training made fast.

    model = deepwell.optimize(model)

and train as before. ``deepwell.restore(model)`` undoes it, ``deepwell.summary(model)`` reports what was
done, ``deepwell.AdamW`` is an optimizer that updates all parameters in one pass, and
``print(deepwell.capture(model))`` shows a model's graph.
"""

import sys as _sys

# `python -m deepwell.tokenize` imports this package first and needs nothing of it; PyTorch alone takes seconds. While
# Python looks for the module to run, "-m" takes its place in sys.argv.
if _sys.argv[:1] != ["-m"] or _sys.orig_argv[-len(_sys.argv)] != "deepwell.tokenize":
    try:
        import torch as _torch  # noqa: F401
    except ImportError as error:  # pragma: no cover - needs an environment without PyTorch
        raise ImportError(
            "deepwell needs PyTorch 2.9 or later, and there is none in this environment: install the build "
            "that fits this machine (see pytorch.org), then import deepwell again"
        ) from error

    from deepwell import _deepwell, checkpoints, numbers
    from deepwell.attention.modules import (
        BlackwellConfig,
        BlackwellFlashAttention,
        DWSelfAttention,
    )
    from deepwell.attention.sdpa import activate_sdpa, deactivate_sdpa
    from deepwell.compiled import Engine, compile, optimize_for_blackwell
    from deepwell.compiled_ops import CompiledOp
    from deepwell.errors import CaptureError, DeepwellError, UnsupportedError
    from deepwell.export import Artifact, export, load_engine
    from deepwell.host_plan import HostPlan
    from deepwell.kept import accumulate
    from deepwell.machine import Hardware, hardware, print_hardware_info, probe
    from deepwell.moe import DeepwellMoE
    from deepwell.muon import Muon
    from deepwell.optim import AdamW
    from deepwell.optimize import optimize, restore, summary
    from deepwell.plans import Plan, autoplan
    from deepwell.precision import (
        MicroscalingConfig,
        Precision,
        PrecisionGuard,
        PrecisionPolicy,
    )
    from deepwell.precision_guard import sample_precision
    from deepwell.simulate import dryrun
    from deepwell.trainer import DivergenceError, Trainer

    # Last: the functions take the names of the modules that they are built on.
    from deepwell.ir import IR, capture  # isort: skip
    from deepwell.parity import ParityResult, parity  # isort: skip

    __version__ = _deepwell.version()

__all__ = [
    "AdamW",
    "Artifact",
    "BlackwellConfig",
    "BlackwellFlashAttention",
    "CaptureError",
    "CompiledOp",
    "DWSelfAttention",
    "DeepwellError",
    "DeepwellMoE",
    "DivergenceError",
    "Engine",
    "Hardware",
    "HostPlan",
    "IR",
    "MicroscalingConfig",
    "Muon",
    "ParityResult",
    "Plan",
    "Precision",
    "PrecisionGuard",
    "PrecisionPolicy",
    "Trainer",
    "UnsupportedError",
    "__version__",
    "accumulate",
    "activate_sdpa",
    "autoplan",
    "capture",
    "checkpoints",
    "compile",
    "deactivate_sdpa",
    "dryrun",
    "export",
    "hardware",
    "load_engine",
    "numbers",
    "optimize",
    "optimize_for_blackwell",
    "parity",
    "print_hardware_info",
    "probe",
    "restore",
    "sample_precision",
    "summary",
]
