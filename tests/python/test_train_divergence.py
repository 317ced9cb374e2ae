"""Runs of `deepwell train` that diverge fail, keep the good checkpoints, and write no model."""

import json

import numpy as np
import pytest
import torch
import train_runs
import transformers
from train_runs import SEQUENCE, VOCABULARY, read_log, run

RARE = 7
STEPS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Makes a GPT-2 whose loss is finite only without the token RARE: that token's embedding
    overflows a LayerNorm. The last layer is not tied to the embeddings, so everything else computes
    as usual."""
    folder = tmp_path_factory.mktemp("overflows") / "model"
    torch.manual_seed(0)
    config = train_runs.config("gpt2")
    config.tie_word_embeddings = False
    made = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        made.get_input_embeddings().weight[RARE] = 3e38
    made.save_pretrained(folder)
    return folder


def arguments(model, folder, bad_steps, *more) -> list:
    """Runs STEPS steps, each of one sequence in the files' order; `bad_steps` of them contain the
    rare token."""
    tokens = np.random.default_rng(1).integers(RARE + 1, VOCABULARY, STEPS * SEQUENCE + 1)
    for step in bad_steps:
        tokens[(step - 1) * SEQUENCE + SEQUENCE // 2] = RARE
    data = train_runs.save_tokens(folder / "tokens.bin", tokens)
    return [
        *("--model", model, "--data", data, "--sequence", SEQUENCE, "--batch", 1, "--no-shuffle"),
        *("--steps", STEPS, "--checkpoint", folder / "ck", "--output", folder / "out"),
        *("--log", folder / "log.jsonl", "--save-every", 1, *more),
    ]


def kept(folder) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "ck").glob("step-*"))


def applied(folder) -> list[bool]:
    return [line["applied"] for line in read_log(folder / "log.jsonl")]


@pytest.mark.parametrize(("keep", "left"), [(1, [4, 5]), (2, [3, 4, 5])])
def test_checkpoints_of_bad_steps_do_not_replace_good_ones(model, keep, left, tmp_path):
    """Step 5 is the last applied step. Only the next step shows that its weights give no finite loss, so the
    checkpoints that it would replace stay.
    """
    given = arguments(model, tmp_path, [6, 7, 8], "--max-bad-steps", 3, "--keep", keep)
    done = run(*given, status=1)
    assert "diverged" in done.stderr and "3 steps in a row" in done.stderr
    assert "step 6 was not applied: the loss is not finite" in done.stdout
    assert applied(tmp_path) == [True] * 5 + [False] * 3
    assert kept(tmp_path) == left
    assert not (tmp_path / "out").exists()
    manifest = json.loads((tmp_path / "ck" / "step-000000000005" / "manifest.json").read_text())
    assert manifest["updates"] == 5


def test_a_last_step_that_is_not_finite_is_a_failure(model, tmp_path):
    done = run(*arguments(model, tmp_path, [9, 10]), status=1)
    assert "2 steps in a row up to step 10" in done.stderr
    assert kept(tmp_path) == [6, 7, 8]
    assert not (tmp_path / "out").exists()


def test_bad_step_in_between_is_skipped(model, tmp_path):
    run(*arguments(model, tmp_path, [5, 7]))
    assert applied(tmp_path) == [step not in (5, 7) for step in range(1, STEPS + 1)]
    assert kept(tmp_path) == [9, 10]
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--eps", 0], "eps is 0"),
        (["--eps", 1e-30], "1e-20"),
        (["--lr", "1e300"], "lr is 1e+300"),
        (["--lr", 1e30], "from 0 to 1"),
        (["--lr", 1.5], "lr is 1.5"),
        (["--weight-decay", 1e30], "weight_decay is 1e+30"),
        (["--weight-decay", 1.01, "--lr", 1], "at most 1"),
        (["--min-lr-ratio", 1.5], "min_lr_ratio is 1.5"),
        (["--steps", 20, "--schedule-steps", 10, "--min-lr-ratio", 0], "schedule_steps"),
    ],
)
def test_contradictory_options(options, named, model, tmp_path):
    given = arguments(model, tmp_path, [])
    assert named in run(*given, *options, status=2).stderr
    assert not (tmp_path / "ck").exists()
