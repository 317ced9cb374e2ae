"""Writes the checkpoints of a Trainer, in a thread beside training."""

from __future__ import annotations

import copy
import json
import os
import threading
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from deepwell import _deepwell
from deepwell.errors import DeepwellError
from deepwell.training import state

TRAINER = "trainer.json"


@dataclass
class Snapshot:
    """All that a checkpoint holds, apart from the run, in memory of its own."""

    step: int
    updates: int
    schedule_steps: int
    run: str  # JSON: options and data
    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    trainer: dict[str, Any]  # JSON
    texts: dict[str, str] = field(default_factory=dict)  # file -> content
    tokenizer: Any = None


def config_text(model: torch.nn.Module) -> str:
    """Returns the content of config.json."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return json.dumps({"architectures": [type(model).__name__]}, indent=2) + "\n"
    config = copy.deepcopy(config)
    config.architectures = [_class_name(model)]
    dtypes = {each.dtype for each in model.parameters()}
    if len(dtypes) == 1:
        config.dtype = str(dtypes.pop()).removeprefix("torch.")
    return config.to_json_string()


def _class_name(model: torch.nn.Module) -> str:
    """fully_shard gives a module a class of its own, with the prefix FSDP."""
    name = type(model).__name__
    if name.startswith("FSDP") and len(type(model).__mro__) > 2:
        return type(model).__mro__[2].__name__
    return name


def texts_of(model: torch.nn.Module, plan: Any) -> dict[str, str]:
    texts = {"config.json": config_text(model)}
    generation = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        texts["generation_config.json"] = generation.to_json_string()
    if plan is not None:
        texts["plan.json"] = plan.to_json()
    return texts


def _write_text(folder: str, name: str, text: str) -> None:
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_files(folder: str) -> None:
    for name in os.listdir(folder):
        handle = os.open(os.path.join(folder, name), os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_finite(snapshot: Snapshot) -> None:
    for name, value in snapshot.model.items():
        if value.is_floating_point() and value.element_size() > 1:
            if not torch.isfinite(value).all():
                raise DeepwellError(
                    f'"{name}" is not finite after step {snapshot.step}, so nothing was written; go on from an earlier '
                    "checkpoint with a smaller learning rate or a longer warm-up"
                )


def write_into(folder: str, snapshot: Snapshot) -> None:
    """Writes the files of a checkpoint, the manifest last, and syncs each."""
    if snapshot.tokenizer is not None:
        snapshot.tokenizer.save_pretrained(folder)
        _sync_files(folder)
    for name, text in snapshot.texts.items():
        _write_text(folder, name, text)
    _write_text(folder, TRAINER, json.dumps(snapshot.trainer))
    state.write(os.path.join(folder, "model.safetensors"), snapshot.model)
    state.write(os.path.join(folder, "optimizer.safetensors"), snapshot.optimizer)
    _deepwell.checkpoint_seal(
        folder, snapshot.run, snapshot.step, snapshot.updates, snapshot.schedule_steps
    )


def write_alone(path: str, snapshot: Snapshot) -> None:
    """Writes a checkpoint to a folder of any name, which appears whole or stays as it was."""
    check_finite(snapshot)
    writer, folder = _deepwell.checkpoint_writer(path)
    write_into(folder, snapshot)
    _deepwell.checkpoint_writer_commit(writer)


class Checkpoints:
    """A folder of checkpoints, locked until ``close``. One checkpoint is written at a time."""

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = os.fspath(folder)
        self.handle = _deepwell.checkpoints_open(folder)
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.prune = False  # a checkpoint was written since the last pruning
        self.written: tuple[int, str] | None = None  # not reported yet

    def newest(self) -> tuple[int, str]:
        """Returns the step and the path of the newest checkpoint, or -1 and "". None is being written then."""
        self.wait()
        return _deepwell.checkpoints_newest(self.handle)

    def write(self, snapshot: Snapshot) -> None:
        """Begins to write, when the checkpoint before has been written."""
        self.wait()
        self.thread = threading.Thread(
            target=self._run, args=(snapshot,), name="deepwell checkpoint", daemon=False
        )
        self.thread.start()

    def _run(self, snapshot: Snapshot) -> None:
        try:
            check_finite(snapshot)
            folder = _deepwell.checkpoints_begin(self.handle, snapshot.step)
            write_into(folder, snapshot)
            _deepwell.checkpoints_commit(self.handle)
            self.written = _deepwell.checkpoints_newest(self.handle)
        except BaseException as error:
            _deepwell.checkpoints_abort(self.handle)
            self.failure = _not_written(snapshot.step, error)

    def is_writing(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def wait(self) -> None:
        """Waits for the checkpoint that is being written. Raises its failure, once."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def report(self, seen: Callable[[int, str], None]) -> None:
        """Tells ``seen`` of a checkpoint that has been written since the last call. Raises a failure."""
        if self.is_writing():
            return
        self.wait()
        written, self.written = self.written, None
        if written is not None:
            self.prune = True
            seen(*written)

    def applied(self, keep: int) -> None:
        """Removes what the newest checkpoint replaces, because a step has been applied to its weights."""
        if self.prune and not self.is_writing():
            self.prune = False
            _deepwell.checkpoints_prune(self.handle, keep)

    def close(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.handle = None


def _not_written(step: int, error: BaseException) -> BaseException:
    failure = DeepwellError(f"the checkpoint of step {step} was not written: {error}")
    failure.__cause__ = error
    return failure
