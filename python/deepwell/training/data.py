"""Where the batches of a Trainer come from, and the position in them that a checkpoint keeps.

Each source yields the batches of epoch after epoch. ``state`` describes, as JSON, the position behind the last batch;
``restore`` goes there. It calls ``ready`` when all random numbers that place the data have been drawn again and before
the next batch is made: that is when the caller sets the random state of the checkpoint.
"""

from __future__ import annotations

import base64
import io
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Callable, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from deepwell import _deepwell
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.training import random_state

Ready = Callable[[], None]


class Source(Protocol):
    length: int | None  # batches in an epoch; None: not known
    elastic: bool  # the position does not depend on the number of ranks, or can be converted

    def begin_step(self, step: int) -> None: ...

    def next(self) -> Any: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any], step: int, ready: Ready) -> None: ...

    def on_other_ranks(self, state: dict[str, Any], before: int, now: int) -> dict[str, Any]: ...


# ---- token files ---------------------------------------------------------------------------------


class TokenFiles:
    """The token files of ``deepwell train``, in its order, read in C. The position is a function of the step."""

    elastic = True

    def __init__(
        self,
        options: dict[str, Any],
        vocabulary: int,
        micro_batches: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        per_call = micro_batches * ranks
        if options["batch"] % per_call:
            raise ValueError(
                f"batch is {options['batch']}; it must be a multiple of accumulate ({micro_batches}) times the number "
                f"of ranks ({ranks})"
            )
        self.files = _deepwell.tokens_open(options, vocabulary)
        self.rows = options["batch"] // per_call
        self.first, self.stride = rank * self.rows, ranks * self.rows
        self.width = options["sequence"] + 1
        self.tokens, self.sequences = _deepwell.tokens_size(self.files)
        self.length = self.sequences // (self.rows * ranks)
        self.micro_batches = micro_batches
        self.calls = 0

    def begin_step(self, step: int) -> None:
        """``step`` steps are done. A step that failed has not moved the position."""
        self.calls = step * self.micro_batches

    def next(self) -> dict[str, torch.Tensor]:
        rows = torch.empty(self.rows, self.width, dtype=torch.int64)
        at = self.calls * self.stride + self.first
        _deepwell.tokens_read(self.files, at, self.rows, self.width, rows.data_ptr())
        self.calls += 1
        # The labels are moved already: each of the `sequence` tokens predicts the next one.
        inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        return {"input_ids": inputs, "labels": labels, "shift_labels": labels}

    def state(self) -> dict[str, Any]:
        return {"kind": "tokens"}

    def restore(self, state: dict[str, Any], step: int, ready: Ready) -> None:
        ready()

    def on_other_ranks(self, state: dict[str, Any], before: int, now: int) -> dict[str, Any]:
        return state


def is_paths(data: Any) -> bool:
    if isinstance(data, (str, bytes, os.PathLike)):
        return True
    return (
        isinstance(data, (list, tuple))
        and len(data) > 0
        and all(isinstance(each, (str, bytes, os.PathLike)) for each in data)
    )


def paths(data: Any) -> tuple[bytes, ...]:
    if isinstance(data, (str, bytes, os.PathLike)):
        data = [data]
    return tuple(os.fsencode(each) for each in data)


# ---- loaders -------------------------------------------------------------------------------------


class _Skipping:
    """A sampler that leaves out its first elements, and then calls ``ready``."""

    def __init__(self, sampler: Iterable[Any], skipped: int, ready: Ready) -> None:
        self.sampler, self.skipped, self.ready = sampler, skipped, ready

    def __iter__(self) -> Iterator[Any]:
        inner = iter(self.sampler)
        for _ in range(self.skipped):
            next(inner, None)
        self.ready()
        yield from inner


class _Epochs:
    """The loop over epochs that all loaders share."""

    kind = ""
    elastic = False

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.length = _length(loader)
        self.epoch, self.batches = 0, 0
        self.iterator: Iterator[Any] | None = None
        self.start: dict[str, Any] = {}

    def begin_step(self, step: int) -> None:
        pass

    def next(self) -> Any:
        for _ in range(2):
            if self.iterator is None:
                self._begin_epoch()
            try:
                batch = next(self.iterator)
            except StopIteration:
                if self.batches == 0:
                    break
                self.epoch, self.batches, self.iterator = self.epoch + 1, 0, None
                continue
            self.batches += 1
            return batch
        raise DeepwellError(
            f"the dataloader gave no batch in epoch {self.epoch + 1}; it must give batches each time that it is iterated"
        )

    def _begin_epoch(self) -> None:
        self._set_epoch()
        self.start = self._start_state()
        self.iterator = iter(self.loader)

    def _set_epoch(self) -> None:
        for holder in _samplers(self.loader):
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(self.epoch)

    def _start_state(self) -> dict[str, Any]:
        return {
            "random": random_state.capture(),
            "generators": random_state.capture_generators(_generators(self.loader)),
        }

    def _restore_start(self, start: dict[str, Any]) -> None:
        if start:
            random_state.restore(start["random"])
            random_state.restore_generators(_generators(self.loader), start["generators"])
        self.start = start

    def state(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "batches": self.batches,
            "start": self.start,
        }

    def restore(self, state: dict[str, Any], step: int, ready: Ready) -> None:
        if state["kind"] != self.kind:
            raise DeepwellError(
                f"the checkpoint's data position is of kind \"{state['kind']}\", and this dataloader's is "
                f'"{self.kind}"; give the same kind of dataloader'
            )
        self.epoch, self.batches = state["epoch"], state["batches"]
        self.iterator = None
        if self.batches == 0:
            ready()
            return
        self._set_epoch()
        self._restore_start(state["start"])
        self._skip(ready)

    def on_other_ranks(self, state: dict[str, Any], before: int, now: int) -> dict[str, Any]:
        raise NotImplementedError  # not elastic

    def _skip(self, ready: Ready) -> None:
        raise NotImplementedError


class MapLoader(_Epochs):
    """A DataLoader over a map-style dataset: rows before the position are not loaded again."""

    kind = "map"
    elastic = True

    def state(self) -> dict[str, Any]:
        return {**super().state(), "rows": self.loader.batch_size}

    def on_other_ranks(self, state: dict[str, Any], before: int, now: int) -> dict[str, Any]:
        """The batches of all ranks so far, in rows, are skipped; a part of a batch is read again."""
        rows = state["rows"] or 1
        batches = state["batches"] * rows * before // ((self.loader.batch_size or rows) * now)
        return {**state, "batches": batches}

    def _skip(self, ready: Ready) -> None:
        loader = self.loader
        shared = {
            "num_workers": loader.num_workers,
            "collate_fn": loader.collate_fn,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "generator": loader.generator,
            "prefetch_factor": loader.prefetch_factor,
        }
        if loader.batch_sampler is not None:
            sampler = _Skipping(loader.batch_sampler, self.batches, ready)
            rest = DataLoader(loader.dataset, batch_sampler=sampler, **shared)
        else:
            sampler = _Skipping(loader.sampler, self.batches, ready)
            rest = DataLoader(loader.dataset, sampler=sampler, batch_size=None, **shared)
        self.iterator = iter(rest)


class StatefulLoader(_Epochs):
    """A loader, or a dataset in one without workers, that has state_dict and load_state_dict."""

    kind = "stateful"

    def __init__(self, loader: Iterable[Any], keeper: Any) -> None:
        super().__init__(loader)
        self.keeper = keeper

    def state(self) -> dict[str, Any]:
        return {**super().state(), "state": _dump(self.keeper.state_dict())}

    def restore(self, state: dict[str, Any], step: int, ready: Ready) -> None:
        if state["kind"] == self.kind:
            self.keeper.load_state_dict(_load(state["state"]))
        super().restore(state, step, ready)

    def _skip(self, ready: Ready) -> None:
        self.iterator = iter(self.loader)
        ready()


class ReplayedLoader(_Epochs):
    """Any other iterable: the batches before the position are made again and dropped."""

    kind = "replayed"

    def _skip(self, ready: Ready) -> None:
        if not isinstance(self.loader, (list, tuple)):
            warnings.warn(
                f"resuming makes the first {self.batches} batches of this epoch again, because the dataloader has no "
                "state_dict and load_state_dict; it must give the same batches",
                stacklevel=2,
            )
        self.iterator = iter(self.loader)
        for _ in range(self.batches):
            next(self.iterator, None)
        ready()


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _samplers(loader: Any) -> list[Any]:
    """Returns what may have set_epoch or a generator: the loader, its dataset and samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ]
    return [each for i, each in enumerate(found) if each is not None and _first(found, each) == i]


def _first(items: Sequence[Any], item: Any) -> int:
    return next(i for i, each in enumerate(items) if each is item)


def _generators(loader: Any) -> list[torch.Generator]:
    found = [getattr(each, "generator", None) for each in _samplers(loader)]
    found = [each for each in found if isinstance(each, torch.Generator)]
    return [each for i, each in enumerate(found) if _first(found, each) == i]


def _dump(state: Any) -> dict[str, Any]:
    try:
        if json.loads(json.dumps(state)) == state:
            return {"json": state}
    except (TypeError, ValueError):
        pass
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {"torch": base64.b64encode(buffer.getvalue()).decode("ascii")}


def _load(state: dict[str, Any]) -> Any:
    if "json" in state:
        return state["json"]
    return torch.load(io.BytesIO(base64.b64decode(state["torch"])), weights_only=True)


# ---- choosing ------------------------------------------------------------------------------------


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Stacks rows that are dicts of numbers, lists, arrays or tensors, as datasets of Hugging Face have them."""
    if not isinstance(rows[0], Mapping):
        return torch.utils.data.default_collate(rows)
    batch = {}
    for key in rows[0]:
        values = [torch.as_tensor(row[key]) for row in rows]
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1:
            raise ValueError(
                f'the rows of a batch have "{key}" of shapes {sorted(shapes)}; pad them, or give a DataLoader with a '
                "collate_fn"
            )
        batch[key] = torch.stack(values)
    return batch


def _is_dataset(data: Any) -> bool:
    return isinstance(data, Dataset) or type(data).__module__.split(".")[0] == "datasets"


def _loader_of(
    dataset: Any, batch: int, shuffle: bool, seed: int, rank: int, ranks: int
) -> DataLoader:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if ranks > 1:
            raise UnsupportedError(
                "an iterable dataset on several ranks needs its own split; give a DataLoader over this rank's rows"
            )
        return DataLoader(dataset, batch_size=batch, collate_fn=collate)
    if batch % ranks:
        raise ValueError(
            f"batch is {batch}; it must be a multiple of the number of ranks ({ranks})"
        )
    sampler: Any = None
    if ranks > 1:
        sampler = DistributedSampler(dataset, ranks, rank, shuffle=shuffle, seed=seed)
    elif shuffle:
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(seed))
    return DataLoader(
        dataset, batch_size=batch // ranks, sampler=sampler, collate_fn=collate, drop_last=True
    )


def source_of(
    data: Any, batch: int = 8, shuffle: bool = True, seed: int = 0, rank: int = 0, ranks: int = 1
) -> Source:
    """Returns the source for a loader, a dataset or any iterable of batches."""
    if _is_dataset(data):
        data = _loader_of(data, batch, shuffle, seed, rank, ranks)
    if isinstance(data, Iterator):
        raise ValueError(
            "the dataloader is an iterator, which ends after one epoch and cannot be resumed; give what it was made of"
        )
    if not isinstance(data, Iterable):
        raise ValueError(
            f"the dataloader is a {type(data).__name__}; expected a DataLoader, a dataset, an iterable of batches, or "
            "paths of token files"
        )
    if _keeps_state(data):
        return StatefulLoader(data, data)
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset) or not hasattr(data.dataset, "__getitem__"):
            if data.num_workers == 0 and _keeps_state(data.dataset):
                return StatefulLoader(data, data.dataset)
        elif type(data) is DataLoader:
            return MapLoader(data)
    return ReplayedLoader(data)


def _keeps_state(data: Any) -> bool:
    return hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


def move(batch: Any, device: torch.device) -> Any:
    """Returns a batch with its tensors on a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        moved = [move(each, device) for each in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
