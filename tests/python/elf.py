"""Parses the parts of ELF files (64 bits, little-endian) that control the loader."""

import struct
from dataclasses import dataclass
from pathlib import Path

_DYNAMIC, _LOAD = 2, 1  # types of program headers
_NEEDED, _STRTAB, _RPATH, _RUNPATH = 1, 5, 15, 29  # tags of the dynamic section


@dataclass(frozen=True)
class Dynamic:
    needed: list[str]  # names of libraries
    run_path: list[str]  # folders of RPATH and RUNPATH, "" for an empty entry


def is_elf(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(6) == b"\x7fELF\x02\x01"


def dynamic(path: Path) -> Dynamic:
    """Returns the dynamic section, found through the program headers as the loader does."""
    data = path.read_bytes()
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]

    def offset_of(address: int) -> int:
        for kind, _, offset, begin, _, length in headers:
            if kind == _LOAD and begin <= address < begin + length:
                return offset + address - begin
        raise ValueError(f"{path}: address {address:#x} is in no segment")

    entries = []
    for kind, _, offset, _, _, length in headers:
        if kind == _DYNAMIC:
            entries = list(struct.iter_unpack("<QQ", data[offset : offset + length]))
    strings = next((offset_of(value) for tag, value in entries if tag == _STRTAB), 0)

    def text(at: int) -> str:
        return data[strings + at : data.index(b"\0", strings + at)].decode()

    needed = [text(value) for tag, value in entries if tag == _NEEDED]
    paths = [text(value) for tag, value in entries if tag in (_RPATH, _RUNPATH)]
    return Dynamic(needed, [folder for path in paths for folder in path.split(":")])


def check_run_paths(files: list[Path]) -> None:
    """Checks that no entry is empty or relative: the loader would search the user's current folder."""
    for file in files:
        for folder in dynamic(file).run_path:
            assert folder.startswith(("/", "$ORIGIN")), f"{file} has the run path entry {folder!r}"
