"""Runs of `deepwell train` that diverge fail, keep the good checkpoints, and write no model."""

import json

import deepwell
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


# ---- loss spikes -----------------------------------------------------------------------------------

SPIKE, SPIKY_STEPS = 14, 18


def spiky(folder, steps: int, *more) -> list:
    """Every step has the same token again and again, which is soon predicted, but step SPIKE has tokens at random."""
    tokens = np.full(SPIKY_STEPS * SEQUENCE + 1, 8)
    at = (SPIKE - 1) * SEQUENCE
    tokens[at + 1 : at + SEQUENCE] = np.random.default_rng(1).integers(9, VOCABULARY, SEQUENCE - 1)
    data = train_runs.save_tokens(folder / "tokens.bin", tokens)
    return [
        *("--model", folder / "model", "--data", data, "--sequence", SEQUENCE, "--batch", 1, "--no-shuffle"),
        *("--steps", steps, "--checkpoint", folder / "ck", "--log", folder / "log.jsonl", "--schedule", "constant"),
        *("--lr", 3e-3, "--spike-factor", 1.5, "--spike-window", 8, "--keep", 9, *more),
    ]  # fmt: skip


def without_speed(folder) -> list[dict]:
    return [{**line, "tokens_per_second": 0} for line in read_log(folder / "log.jsonl")]


def test_a_loss_spike_is_skipped_and_a_run_resumes_before_it(tmp_path):
    folders = [tmp_path / name for name in ("whole", "cut", "trainer")]
    for folder in folders:
        folder.mkdir()
        train_runs.save_model(folder / "model", "gpt2")
    done = run(*spiky(folders[0], SPIKY_STEPS))
    assert f"step {SPIKE} was not applied: its loss is a spike, above" in done.stdout
    assert applied(folders[0]) == [step != SPIKE for step in range(1, SPIKY_STEPS + 1)]
    lines = without_speed(folders[0])
    bad = lines[SPIKE - 1]
    assert bad["loss"] > bad["spike_limit"] and "not_finite" not in bad
    # The mean of 8 losses, without that of the step before: steps 5 to 12.
    known = [line["loss"] for line in lines[SPIKE - 10 : SPIKE - 2]]
    assert bad["spike_limit"] == pytest.approx(1.5 * sum(known) / 8, rel=1e-12)
    manifest = json.loads(
        (folders[0] / "ck" / f"step-{SPIKY_STEPS:012}" / "manifest.json").read_text()
    )
    assert manifest["updates"] == SPIKY_STEPS - 1 and len(manifest["losses"]) == 9

    for folder in folders[1:]:
        run(*spiky(folder, SPIKE - 1))
    run(*spiky(folders[1], SPIKY_STEPS), "--resume")
    assert without_speed(folders[1]) == lines
    weights = [next((folder / "ck").glob(f"step-{SPIKY_STEPS:012}")) for folder in folders[:2]]
    ours, theirs = ((each / "model.safetensors").read_bytes() for each in weights)
    assert ours == theirs
    trainer = deepwell.Trainer(
        train_runs.load_model(folders[2] / "model"), folders[2] / "tokens.bin", sequence=SEQUENCE, batch=1,
        shuffle=False, steps=SPIKY_STEPS, lr=3e-3, schedule="constant", optimize=False, checkpoint=folders[2] / "ck",
        resume=True, spike_factor=1.5, spike_window=8, progress=False, log=folders[2] / "log.jsonl",
    )  # fmt: skip
    trainer.fit()
    assert trainer.spikes == 1 and applied(folders[2]) == applied(folders[0])
    limit = read_log(folders[2] / "log.jsonl")[SPIKE - 1]["spike_limit"]
    assert limit == pytest.approx(bad["spike_limit"], rel=1e-12)


def test_spikes_in_a_row_are_a_failure(tmp_path):
    train_runs.save_model(tmp_path / "model", "gpt2")
    done = run(*spiky(tmp_path, SPIKE, "--max-bad-steps", 3), status=1)
    assert "1 step in a row up to step 14 was bad and not applied" in done.stderr
    assert "a spike above" in done.stderr
    assert "spike_factor is 0.5" in run(*spiky(tmp_path, 3), "--spike-factor", 0.5, status=2).stderr
