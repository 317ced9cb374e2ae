"""The name DeepwellMoE, which this version does not support."""

from __future__ import annotations

from deepwell.errors import UnsupportedError


class DeepwellMoE:
    """A layer of experts with its router. Not supported in this version: creating one raises ``UnsupportedError``."""

    def __init__(self, *arguments: object, **options: object) -> None:
        raise UnsupportedError(
            "deepwell.DeepwellMoE is not supported in this version. deepwell.optimize runs the mixtures of transformers "
            "(MixtralForCausalLM and others), deepwell.kernels.cutlass_bindings.GroupedGEMMKernel multiplies the matrices of "
            "all experts in one call, and deepwell.autoplan(model, moe={...}) plans a mixture"
        )
