"""Exceptions that Deepwell raises on purpose."""


class DeepwellError(RuntimeError):
    """Base of everything below: catch this to catch them all."""


class UnsupportedError(DeepwellError):
    """Asked for something that this version or this machine does not have."""


class CaptureError(DeepwellError):
    """A module could not be turned into a graph.

    ``operation`` is the operation that has no lowering (or None), ``module_path`` the dotted name of the
    module that called it ("" for the model itself). ``of_call`` is true where not the module but the
    arguments of the call are at fault: other calls of the same module may be captured.
    """

    def __init__(
        self,
        message: str,
        operation: str | None = None,
        module_path: str = "",
        of_call: bool = False,
    ) -> None:
        super().__init__(message)
        self.of_call = of_call
        self.operation = operation
        self.module_path = module_path
