"""Builds examples/c with pkg-config against an installed prefix, as a user does, and runs them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import train_runs
from test_installed_files import ROOT, install
from test_tokenizer import trained

EXAMPLES = sorted((ROOT / "examples" / "c").glob("*.c"))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefix")
    install(folder)
    return folder


@pytest.fixture(scope="module")
def built(prefix):
    """The folder of the programs."""
    if not shutil.which("pkg-config"):
        pytest.skip("this machine has no pkg-config")
    (package,) = prefix.rglob("deepwell.pc")
    asked = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "deepwell"],
        env={**os.environ, "PKG_CONFIG_PATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    flags = asked.stdout.split()
    for source in EXAMPLES:
        command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-Wpedantic", source, *flags]
        command += ["-o", prefix / source.stem]
        subprocess.run(command, check=True, timeout=60)
    return prefix


def run(prefix: Path, *command, **environment) -> subprocess.CompletedProcess:
    (library,) = prefix.rglob("libdeepwell.so")
    return subprocess.run(
        [str(word) for word in command],
        cwd=prefix,
        env={**os.environ, "LD_LIBRARY_PATH": str(library.parent), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_there_are_five_short_examples():
    names = ["attend", "experts", "plan_cluster", "tokenize", "train_folder"]
    assert [source.stem for source in EXAMPLES] == names
    for source in EXAMPLES:
        assert len(source.read_text().splitlines()) < 100, source


def test_attention_runs_or_says_what_to_do(built):
    result = run(built, built / "attend")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "first output" in result.stdout or "deepwell emulate -- ./attend" in result.stdout


def test_attention_runs_on_the_installed_emulator(built):
    # Skips the first-use check, which would run every kernel and its reference.
    command = [built / "bin" / "deepwell", "emulate", "--", built / "attend"]
    result = run(built, *command, DEEPWELL_FIRST_USE_CHECK="off")
    if "nvrtc" in result.stderr.lower():
        pytest.skip("the kernels were not compiled into this build, and there is no compiler")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "add up to 192" in result.stdout
    assert "no findings" in result.stderr


def test_experts_run_on_an_emulated_gpu_by_its_name(built):
    result = run(built, built / "experts", "emulator:sm_100a")
    if "nvrtc" in result.stderr.lower():
        pytest.skip("the kernels were not compiled into this build, and there is no compiler")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 experts on emulator:sm_100a: 0 elements differ" in result.stdout
    assert "quantized to MXFP8: 100 x 128" in result.stdout or "libnvrtc" in result.stdout


def test_a_folder_is_trained(built, tmp_path):
    model = train_runs.save_model(tmp_path / "model", "llama")
    tokens, output = tmp_path / "tokens.bin", tmp_path / "out"
    np.tile(np.arange(train_runs.VOCABULARY, dtype=np.uint16), 200).tofile(tokens)
    result = run(built, built / "train_folder", model, tokens, output, 30)
    assert result.returncode == 0, result.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(losses) == 30 and losses[-1] < losses[0]
    assert f"saved to {output}" in result.stdout
    assert train_runs.load_model(output).config.model_type == "llama"
    again = run(built, built / "train_folder", tmp_path / "none", tokens, output)
    assert again.returncode == 1 and "train_folder: " in again.stderr
    names = run(built, built / "train_folder")
    assert names.returncode == 2 and "gpt2" in names.stderr


def test_a_text_is_tokenized(built, tmp_path):
    tokenizer = trained("gpt2")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "The engine's 日本"
    result = run(built, built / "tokenize", tmp_path, text)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [int(line.split("\t")[0]) for line in lines[:-1]] == tokenizer.encode(text).ids
    assert lines[-1].endswith(f"the tokenizer has {tokenizer.get_vocab_size()}")
    missing = run(built, built / "tokenize", tmp_path / "none", text)
    assert missing.returncode == 1 and "tokenize: cannot open" in missing.stderr


def test_a_cluster_is_planned(built):
    result = run(built, built / "plan_cluster", "llama3-8b", "h100:16")
    assert result.returncode == 0, result.stderr
    assert "16 x h100" in result.stdout and "simulated: " in result.stdout
    assert re.search(r"FSDP alone: [\d.]+ s a step, fits", result.stdout)
    missing = run(built, built / "plan_cluster", "llama3-8b", "abacus:16")
    assert missing.returncode == 1 and "abacus" in missing.stderr
