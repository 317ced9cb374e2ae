"""Programs and libraries as they are built and installed: where the loader looks for what they need."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elf import check_run_paths, dynamic, is_elf
from program import PROGRAM, run

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "release"


def elf_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if is_elf(path)]


def cmake() -> str:
    beside = Path(sys.executable).with_name("cmake")
    return str(beside) if beside.exists() else shutil.which("cmake")


@pytest.mark.parametrize("tag", ["enable", "disable"])
def test_run_paths_are_read_from_files(tag, tmp_path):
    library = tmp_path / "library.so"
    options = [f"-Wl,-rpath,/one:$ORIGIN/two:,--{tag}-new-dtags", "-Wl,--no-as-needed", "-lm"]
    subprocess.run(
        ["cc", "-shared", "-x", "c", "/dev/null", *options, "-o", library], check=True, timeout=60
    )
    found = dynamic(library)
    assert found.run_path == ["/one", "$ORIGIN/two", ""]
    assert "libm.so.6" in found.needed
    with pytest.raises(AssertionError, match="entry ''"):
        check_run_paths([library])


def test_built_files_name_their_folders():
    files = [PROGRAM, *elf_files(BUILD / "bin"), *elf_files(BUILD / "lib")]
    names = {file.name for file in files}
    assert {"deepwell", "_deepwell.abi3.so", "libcuda.so.1", "libcudart.so.13"} <= names
    check_run_paths(files)


def test_installed_files_name_their_folders(tmp_path):
    command = [cmake(), "--install", BUILD, "--prefix", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    files = elf_files(tmp_path)
    names = {file.name for file in files}
    assert {"deepwell", "libdw_fmha_bridge_min.so", "libcuda.so.1", "libcudart.so.13"} <= names
    check_run_paths(files)
    for file in files:  # the installed tree may be moved
        assert all(folder.startswith("$ORIGIN") for folder in dynamic(file).run_path), file
    result = subprocess.run(
        [tmp_path / "bin" / "deepwell", "--version"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr


def test_libraries_in_the_current_folder_are_not_loaded(tmp_path):
    needed = dynamic(PROGRAM).needed
    assert needed
    for name in needed:
        (tmp_path / name).write_bytes(b"not a library")  # the loader ends a program over one
    result = subprocess.run(
        [PROGRAM, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_the_environments_program_finds_the_emulator():
    result = run("emulate", "--", "/usr/bin/env")
    assert result.returncode == 0, result.stderr
    folders = [
        line.partition("=")[2].split(":")[0]
        for line in result.stdout.splitlines()
        if line.startswith("LD_LIBRARY_PATH=")
    ]
    assert len(folders) == 1 and (Path(folders[0]) / "libcuda.so.1").is_file()
