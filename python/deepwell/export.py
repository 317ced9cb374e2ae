"""One file of a model and its tokenizer, which generates text without Python.

    artifact = deepwell.export(model, "model.engine", tokenizer=tokenizer)
    artifact = deepwell.load_engine("model.engine")
    artifact.generate("Once upon a time", max_new_tokens=50)

``deepwell run model.engine`` and include/deepwell/artifact.h read the same file.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import torch

from deepwell import _deepwell
from deepwell.errors import DeepwellError, UnsupportedError

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raises Deepwell's exceptions for those of the extension."""
    try:
        yield
    except IndexError:
        raise
    except _deepwell.Error as error:
        kind = UnsupportedError if getattr(error, "status", "") == "UNSUPPORTED" else DeepwellError
        raise kind(str(error)) from None


class Artifact:
    """An exported model. ``config`` is its config.json as a dict, ``dtype`` the type of the weights in the file ("f32",
    "bf16", "f16"), ``precision`` the rounding of linear layers, ``end_tokens`` the ids after which a text ends. Weights are read when they are first needed."""

    def __init__(
        self, path: str | os.PathLike[str], device: str = "cpu", dtype: str | None = None
    ) -> None:
        self.path = os.fspath(path)
        self.device = device
        with _errors():
            self._artifact = _deepwell.artifact_open(self.path)
        info = _deepwell.artifact_info(self._artifact)
        self.config: dict[str, Any] = json.loads(info["config"])
        self.dtype: str = info["dtype"]
        self.precision: str = info["precision"]
        self.end_tokens: list[int] = info["end_tokens"]
        self.has_tokenizer: bool = info["has_tokenizer"]
        self._vocabulary: int = info["vocabulary"]
        self._compute_dtype = dtype
        self._made_session = None
        self._lock = threading.RLock()  # a session is for one thread at a time
        self._runs = False

    def __repr__(self) -> str:
        return f"deepwell.Artifact({self.path!r}, {self.config.get('model_type')}, {self.dtype}, {self.device})"

    @contextlib.contextmanager
    def _session(self) -> Iterator[Any]:
        """The session, for this thread alone."""
        with self._lock, _errors():
            if self._runs:
                raise DeepwellError(
                    "the artifact is generating: call it again after its on_token has returned"
                )
            if self._made_session is None:
                self._made_session = _deepwell.session_create(
                    self._artifact, self.device, self._compute_dtype
                )
            self._runs = True
            try:
                yield self._made_session
            finally:
                self._runs = False

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text; with ``special`` also the tokens that the tokenizer puts around every text."""
        with _errors():
            return _deepwell.artifact_encode(self._artifact, text.encode(), special)

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        with _errors():
            return _deepwell.artifact_decode(self._artifact, _row(ids), skip_special).decode(
                "utf-8", "replace"
            )

    def generate(
        self,
        inputs: str | Sequence[int] | torch.Tensor,
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        ignore_end: bool = False,
        on_token: Callable[[int], Any] | None = None,
    ) -> Any:
        """Continues ``inputs`` by up to ``max_new_tokens`` tokens, until an end token unless ``ignore_end``.

        A text gives the new text. A list of ids gives the ids with the new ones behind them. A tensor [S] or [B, S]
        gives such a tensor, in which rows that end early are filled up with the first end token. Rows of a batch are
        continued one after another.

        ``temperature`` 0 takes the most likely token. Otherwise logits are divided by it, the ``top_k`` most likely
        tokens are kept (0: all), then the fewest whose probabilities reach ``top_p``; ``seed`` makes the choice
        repeatable. ``on_token`` receives each new id; a true result ends the text.
        """
        options = (max_new_tokens, temperature, top_k, top_p, seed, ignore_end, on_token)
        if isinstance(inputs, str):
            return self.decode(self._continue(self.encode(inputs), options))
        if isinstance(inputs, torch.Tensor) and inputs.dim() == 2:
            rows = [row + self._continue(row, options) for row in inputs.tolist()]
            longest = max((len(row) for row in rows), default=0)
            fill = (self.end_tokens or [0])[0]
            filled = [row + [fill] * (longest - len(row)) for row in rows]
            return torch.tensor(filled, dtype=torch.int64, device=inputs.device).reshape(
                len(rows), longest
            )
        row = _row(inputs)
        made = row + self._continue(row, options)
        if isinstance(inputs, torch.Tensor):
            return torch.tensor(made, dtype=torch.int64, device=inputs.device)
        return made

    def _continue(self, ids: list[int], options: tuple[Any, ...]) -> list[int]:
        with self._session() as session:
            return _deepwell.session_generate(session, ids, *options)

    def logits(self, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """The FP32 logits behind each token: [S, vocabulary] for ids [S], [B, S, vocabulary] for [B, S]."""
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            rows = [self.logits(row) for row in ids]
            return torch.stack(rows) if rows else torch.empty(*ids.shape, self._vocabulary)
        row = _row(ids)
        result = torch.empty(len(row), self._vocabulary)
        with self._session() as session:
            _deepwell.session_logits(session, row, result.data_ptr())
        return result


def _row(ids: Any) -> list[int]:
    if isinstance(ids, torch.Tensor):
        if ids.dim() != 1:
            raise ValueError(f"ids have {ids.dim()} dimensions; expected 1 or 2")
        return ids.tolist()
    return [int(id) for id in ids]


def _model_of(engine: Any) -> torch.nn.Module:
    """The model in an engine, a trainer or a wrapper: the object itself if it has a Hugging Face configuration."""
    found = engine
    for _ in range(8):
        found = getattr(found, "_orig_mod", found)  # of torch.compile
        if isinstance(found, torch.nn.Module) and hasattr(
            getattr(found, "config", None), "to_dict"
        ):
            return found
        inner = getattr(found, "model", None)
        found = inner if inner is not None else getattr(found, "module", None)
    raise UnsupportedError(
        f"export: {type(engine).__name__} is not a Hugging Face model and holds none; expected GPT-2, Llama, Qwen3 or "
        "Mistral with a language-model head, an engine or trainer of one, or a folder"
    )


def _tokenizer_text(tokenizer: Any) -> str | None:
    """The text of a tokenizer.json: from a path, a tokenizer of transformers, or one of tokenizers."""
    if tokenizer is None:
        return None
    if isinstance(tokenizer, (str, os.PathLike)):
        path = Path(tokenizer)
        return (path / "tokenizer.json" if path.is_dir() else path).read_text(encoding="utf-8")
    found = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(found, "to_str"):
        return found.to_str()
    raise UnsupportedError(
        f"export: tokenizer is {type(tokenizer).__name__}; expected a tokenizer.json, a fast tokenizer of transformers, "
        "or one of tokenizers"
    )


def _weights(model: torch.nn.Module, config: str) -> list[torch.Tensor]:
    tensors = dict(model.named_parameters(remove_duplicate=False))
    found = []
    for name, shape in _deepwell.artifact_parameters(config):
        tensor = tensors.get(name)
        if tensor is None:
            raise UnsupportedError(
                f"export: {type(model).__name__} has no parameter {name!r}; expected a model with a language-model head"
            )
        if tensor.is_meta:
            raise UnsupportedError(
                f"export: {name} is on the meta device; load the model's weights first"
            )
        if list(tensor.shape) != shape:
            raise DeepwellError(
                f"export: {name} has the shape {list(tensor.shape)}; the configuration says {shape}"
            )
        found.append(tensor.detach().to("cpu", torch.float32).contiguous())
    return found


def export(
    model: Any,
    path: str | os.PathLike[str] = "model.engine",
    tokenizer: Any = None,
    dtype: str | None = None,
    precision: str = "fp32",
) -> Artifact:
    """Writes a model to one file that ``load_engine``, ``deepwell run`` and C read, and opens it.

    ``model``: GPT-2, Llama, Qwen3 or Mistral of transformers with a language-model head, optimized or not; an object
    that holds one as ``.model`` (an engine, a trainer); or a folder of ``save_pretrained`` or of ``deepwell train``'s
    checkpoints, whose tokenizer is then the default. ``tokenizer``: a tokenizer.json, or a fast tokenizer of
    transformers. ``dtype`` of the file: "f32", "bf16" or "f16"; by default the model's. ``precision`` says how operands of
    linear layers are rounded when the artifact runs ("fp32": not at all; "bf16", "mxfp8", "nvfp4").
    """
    text = _tokenizer_text(tokenizer)
    if isinstance(model, (str, os.PathLike)):
        with _errors():
            _deepwell.artifact_export(os.fspath(model), os.fspath(path), dtype, text, precision)
        return Artifact(path)
    found = _model_of(model)
    config = json.dumps(found.config.to_dict(), default=str)
    generation = getattr(found, "generation_config", None)
    with _errors():
        weights = _weights(found, config)
        if dtype is None:
            dtype = _DTYPES.get(next(found.parameters()).dtype, "f32")
        addresses = [weight.data_ptr() for weight in weights]
        end = json.dumps({"eos_token_id": getattr(generation, "eos_token_id", None)})
        _deepwell.artifact_write(config, addresses, os.fspath(path), dtype, text, end, precision)
    return Artifact(path)


def load_engine(
    path: str | os.PathLike[str], device: str = "cpu", dtype: str | None = None
) -> Artifact:
    """Opens a file that ``export`` or ``deepwell export`` wrote. ``device``: "cpu", "cuda", or an emulated GPU.
    ``dtype``: of the computation, "f32" or "bf16"; by default FP32 on a CPU, and on a GPU BF16 if the file has it."""
    return Artifact(path, device, dtype)
