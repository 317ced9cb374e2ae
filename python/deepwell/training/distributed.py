"""Folders of torch.distributed.checkpoint (DCP): tensors are read and written one after the other.

Such a folder has the file ``.metadata``, which lists each tensor and in which file and at which offset the pieces of it
are that the ranks wrote. PyTorch's own planner, reader and writer do the work; here is what they do not have: metadata
are read without running code that a file names, files that are cut short are found before anything is read, and a
tensor exists in memory only while it is written.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from deepwell.errors import DeepwellError

METADATA = ".metadata"


# ---- metadata ------------------------------------------------------------------------------------

# The classes that metadata are made of, of all versions since PyTorch 2.2.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"} | {n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which metadata do not have")
        return super().find_class(module, name)


def _read_metadata(path: str) -> Metadata:
    file_name = os.path.join(path, METADATA)
    try:
        with open(file_name, "rb") as file:
            found = _Unpickler(file).load()
    except FileNotFoundError:
        raise DeepwellError(
            f'"{path}" has no file {METADATA}: it is not a folder of torch.distributed.checkpoint, or the save that made '
            "it did not end; give a folder whose save was complete"
        ) from None
    except OSError:
        raise
    except Exception as error:
        raise DeepwellError(f'"{file_name}" is damaged or of another program: {error}') from None
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise DeepwellError(
            f'"{file_name}" is not metadata of FileSystemWriter; expected a folder that dcp.save wrote'
        )
    return found


class _Reader(FileSystemReader):
    def __init__(self, path: str, metadata: Metadata) -> None:
        super().__init__(path)
        self.known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.known.storage_meta is None:
            self.known.storage_meta = StorageMeta()
        return self.known


class _LoadPlanner(DefaultLoadPlanner):
    """Values that are not tensors are read without running code that a file names."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _cause(error: CheckpointException) -> BaseException:
    """The first rank's failure, without PyTorch's traceback in the message."""
    return next((pair[0] for pair in error.failures.values()), error)


class Folder:
    """A folder to read. ``tensors``: shape and dtype of each; ``values``: names of what is no tensor."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = os.fspath(path)
        self.metadata = _read_metadata(self.path)
        entries = self.metadata.state_dict_metadata
        self.tensors: dict[str, tuple[torch.Size, torch.dtype]] = {
            name: (each.size, each.properties.dtype)
            for name, each in entries.items()
            if isinstance(each, TensorStorageMetadata)
        }
        self.values = [name for name in entries if name not in self.tensors]
        self._check_files()
        self._reader = _Reader(self.path, self.metadata)

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            name = info.relative_path
            if os.path.isabs(name) or ".." in name.split("/"):
                raise DeepwellError(
                    f'"{self.path}/{METADATA}" names the file "{name}", which is outside of the folder'
                )
            ends[name] = max(ends.get(name, 0), info.offset + info.length)
        for name, end in ends.items():
            path = os.path.join(self.path, name)
            size = os.path.getsize(path) if os.path.exists(path) else None
            if size is None or size < end:
                what = "is missing" if size is None else f"has {size} bytes"
                raise DeepwellError(
                    f'"{path}" {what}, but {METADATA} expects at least {end}; copy the folder again, or use an earlier '
                    "checkpoint"
                )

    def place(self, name: str) -> list[tuple[str, int]]:
        """The file and the offset of each piece of a tensor. Two names with the same places are one tensor."""
        entry = self.metadata.state_dict_metadata[name]
        infos = [
            self.metadata.storage_data[MetadataIndex(name, each.offsets)] for each in entry.chunks
        ]
        return [(info.relative_path, info.offset) for info in infos]

    def read(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Reads tensors into those of ``wanted``, which may be shards (DTensor), and returns it.

        Reads values for names that stand for none (None).
        """
        for name, tensor in wanted.items():
            self._check(name, tensor)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a process without a process group
                dcp.load(wanted, storage_reader=self._reader, planner=_LoadPlanner(), no_dist=True)
        except CheckpointException as error:
            cause = _cause(error)
            raise DeepwellError(
                f'"{self.path}": cannot read "{next(iter(wanted))}" or one of the {len(wanted) - 1} entries after it: '
                f"{cause}; the folder may be damaged"
            ) from cause
        return wanted

    def _check(self, name: str, tensor: Any) -> None:
        if name not in self.metadata.state_dict_metadata:
            raise DeepwellError(
                f'"{self.path}" has no "{name}"; it is a checkpoint of another model or optimizer'
            )
        if isinstance(tensor, torch.Tensor):
            size, dtype = self.tensors.get(name, (None, None))
            if (size, dtype) != (tensor.shape, tensor.dtype):
                raise DeepwellError(
                    f'"{self.path}": "{name}" is {dtype} of shape {list(size or ())}, but {tensor.dtype} of shape '
                    f"{list(tensor.shape)} is expected; the checkpoint is of another model, shape or element type"
                )

    def value(self, name: str) -> Any:
        return self.read({name: None})[name]

    def whole(self, name: str) -> torch.Tensor:
        size, dtype = self.tensors[name]
        return self.read({name: torch.empty(size, dtype=dtype)})[name]

    def pieces(
        self, names: Mapping[str, str], most: int = 1 << 24
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Reads the tensors ``names`` (name to be given -> name in the folder), about ``most`` bytes at a time."""
        piece: dict[str, str] = {}
        size = 0
        for name, key in names.items():
            shape, dtype = self.tensors[key]
            bytes_of = shape.numel() * dtype.itemsize
            if piece and size + bytes_of > most:
                yield self._piece(piece)
                piece, size = {}, 0
            piece[name] = key
            size += bytes_of
        if piece:
            yield self._piece(piece)

    def _piece(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        places = {
            key: torch.empty(self.tensors[key][0], dtype=self.tensors[key][1])
            for key in names.values()
        }
        read = self.read(places)
        return {name: read[key] for name, key in names.items()}


# ---- writing -------------------------------------------------------------------------------------


class _SavePlanner(DefaultSavePlanner):
    """Tensors on the meta device stand for tensors that ``read`` returns when they are written."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self.read = read

    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        found = self.lookup_object(write_item.index)
        return self.read(write_item.index.fqn) if found.is_meta else found


class _Writer(FileSystemWriter):
    """Writes a tensor with several names once, and has one tensor in memory at a time (PyTorch's keeps all of a file)."""

    def __init__(self, path: str, aliases: Mapping[tuple[str, ...], tuple[str, ...]]) -> None:
        super().__init__(path)
        self.aliases = aliases

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = []
        with open(os.path.join(self.path, name), "wb") as stream:
            for item in plan.items:
                begin = stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    torch.save(data, stream)
                else:
                    stream.write(data.getbuffer())
                del data
                length = stream.tell() - begin
                place = _StorageInfo(name, begin, length)
                results.append(WriteResult(item.index, length, place))
            stream.flush()
            os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        more = []
        for alias, path in self.aliases.items():
            name, other = ".".join(alias), ".".join(path)
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata[other]
            metadata.planner_data[name] = alias
            for result in (each for rank in results for each in rank if each.index.fqn == other):
                index = MetadataIndex(name, result.index.offset, result.index.index)
                more.append(WriteResult(index, result.size_in_bytes, result.storage_data))
        super().finish(metadata, [*results, more])


def write(
    folder: str,
    state: dict[str, Any],
    read: Callable[[str], torch.Tensor],
    aliases: Mapping[tuple[str, ...], tuple[str, ...]],
) -> None:
    """Writes a state dict into an empty folder and syncs its files.

    ``read`` returns the tensor for a name whose tensor in ``state`` is on the meta device. ``aliases``: further names of
    tensors, as paths.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a process without a process group
            dcp.save(
                state,
                storage_writer=_Writer(folder, aliases),
                planner=_SavePlanner(read),
                no_dist=True,
            )
    except CheckpointException as error:
        raise _cause(error) from None
