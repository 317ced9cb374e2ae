"""Programs and libraries as they are built and installed: the folders in which the loader
searches."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elf import check_run_paths, dynamic, is_elf
from program import PROGRAM, run

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "release"


def needs_build() -> None:
    if not BUILD.exists():
        pytest.skip("there is no build tree: run make")


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
    needs_build()
    files = [PROGRAM, *elf_files(BUILD / "bin"), *elf_files(BUILD / "lib")]
    names = {file.name for file in files}
    assert {"deepwell", "_deepwell.abi3.so", "libdeepwell_emulator.so", "libcuda.so.1"} <= names
    assert "libcudart.so.13" in names
    check_run_paths(files)


def install(prefix: Path, *options: str) -> None:
    needs_build()
    command = [cmake(), "--install", BUILD, "--prefix", prefix, *options]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def test_installed_files_name_their_folders(tmp_path):
    install(tmp_path)
    files = elf_files(tmp_path)
    names = {file.name for file in files}
    assert {"deepwell", "libdw_fmha_bridge_min.so", "libdeepwell_emulator.so"} <= names
    assert {"libcuda.so.1", "libcudart.so.13"} <= names
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
        # The loader ends a program with such an entry.
        (tmp_path / name).write_bytes(b"not a library")
    result = subprocess.run(
        [PROGRAM, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_emulator_is_found_only_beside_the_library(tmp_path):
    """The emulator is loaded from the prefix. If it is missing, the message names it and the
    expected place. It is never loaded from the current folder."""
    prefix, elsewhere = tmp_path / "prefix", tmp_path / "elsewhere"
    install(prefix)
    elsewhere.mkdir()
    (library,) = prefix.rglob("libdeepwell_emulator.so")

    def emulate(**environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [prefix / "bin" / "deepwell", "emulate", "--", "/bin/true"],
            cwd=elsewhere,
            env={"PATH": os.environ["PATH"], **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    result = emulate()
    assert result.returncode == 0, result.stderr
    moved = library.rename(elsewhere / library.name)
    result = emulate()
    assert result.returncode == 3
    assert f"could not be loaded ({prefix.resolve()}" in result.stderr, result.stderr
    assert "name the file in DEEPWELL_EMULATOR" in result.stderr
    assert emulate(DEEPWELL_EMULATOR=str(moved)).returncode == 0
    result = emulate(DEEPWELL_EMULATOR=moved.name)
    assert result.returncode == 3 and "must be an absolute path" in result.stderr
    (other,) = prefix.rglob("libdw_fmha_bridge_min.so")
    result = emulate(DEEPWELL_EMULATOR=str(other))
    assert result.returncode == 3 and "another version of Deepwell" in result.stderr


def test_an_installation_without_the_emulator_works_and_says_what_is_missing(tmp_path):
    """A package may leave out the component that contains it."""
    program = tmp_path / "say.c"
    program.write_text(
        """#include <deepwell/deepwell.h>
        #include <deepwell/emulator.h>
        #include <stdio.h>
        int main(void) {
            const dw_device *cpu, *gpu;
            dw_emulator *emulator;
            if (dw_device_find("cpu", &cpu) != DW_OK) return 1;
            if (dw_device_find("emulator:sm_90a", &gpu) != DW_UNSUPPORTED) return 2;
            puts(dw_last_error());
            if (dw_emulator_create("sm_90a", NULL, &emulator) != DW_UNSUPPORTED) return 3;
            return 0;
        }"""
    )
    install(tmp_path, "--component", "Unspecified")
    assert not list(tmp_path.rglob("*emulator.so")) and not list(tmp_path.rglob("libcuda.so*"))
    (library,) = tmp_path.rglob("libdeepwell.so")
    folder = library.parent
    command = ["cc", program, "-o", tmp_path / "say", "-I", tmp_path / "include"]
    subprocess.run([*command, f"-Wl,-rpath,{folder}", library], check=True, timeout=60)
    header = (ROOT / "include/deepwell/version.h").read_text()
    version = re.search(r'DW_VERSION "(\d+\.\d+)\.\d+"', header)[1]
    assert f"libdeepwell.so.{version}" in dynamic(tmp_path / "say").needed
    result = subprocess.run([tmp_path / "say"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout
    assert "libdeepwell_emulator.so, which could not be loaded" in result.stdout


def test_program_of_the_environment_finds_the_emulator():
    result = run("emulate", "--", "/usr/bin/env")
    assert result.returncode == 0, result.stderr
    folders = [
        line.partition("=")[2].split(":")[0]
        for line in result.stdout.splitlines()
        if line.startswith("LD_LIBRARY_PATH=")
    ]
    assert len(folders) == 1 and (Path(folders[0]) / "libcuda.so.1").is_file()
