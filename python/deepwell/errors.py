"""Exceptions that Deepwell raises."""


class DeepwellError(RuntimeError):
    """The base class of Deepwell's exceptions."""


class UnsupportedError(DeepwellError):
    """This version or this machine does not support the request."""


class CaptureError(DeepwellError):
    """A module cannot be turned into a graph.

    ``operation`` is the operation without a lowering, or None. ``module_path`` is the dotted name of the module that
    called it, "" for the model itself. ``of_call`` is true if the arguments of the call are the reason, not the module:
    other calls of the same module may be captured. ``of_effect`` is true if the forward changes something outside of its
    results, which it may do in its first call only.
    """

    def __init__(
        self,
        message: str,
        operation: str | None = None,
        module_path: str = "",
        of_call: bool = False,
        of_effect: bool = False,
    ) -> None:
        super().__init__(message)
        self.of_call = of_call
        self.of_effect = of_effect
        self.operation = operation
        self.module_path = module_path
