"""Compares `deepwell train` with PyTorch: the same start, the same batches, torch's AdamW, a
schedule and clipping."""

import json
import math
import os
import pty
import resource
import subprocess
import sys
from pathlib import Path

import deepwell
import numpy as np
import pytest
import torch
import train_runs
from test_program import find_program
from train_runs import SEQUENCE, VOCABULARY, command, losses, read_log, run

FAMILIES = ["gpt2", "llama", "qwen3", "mistral"]
STEPS, BATCH, SEED = 50, 4, 3
LR, WARMUP, RATIO, DECAY, CLIP = 5e-3, 5, 0.1, 0.1, 0.7


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Uses one thread for PyTorch: these models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokens():
    return train_runs.random_tokens(900)


@pytest.fixture(scope="module")
def data(tokens, tmp_path_factory):
    return train_runs.save_tokens(tmp_path_factory.mktemp("data") / "tokens.bin", tokens)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: train_runs.save_model(folder / family, family) for family in FAMILIES}


def schedule(step: int) -> float:
    if step <= WARMUP:
        return LR * step / WARMUP
    progress = (step - WARMUP) / (STEPS - WARMUP)
    return LR * (RATIO + (1 - RATIO) * (1 + math.cos(math.pi * progress)) / 2)


def mean_loss(model, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train_in_torch(folder, tokens, shuffle=True, decay_all=False):
    """Returns losses, gradient norms and the model."""
    model = train_runs.load_model(folder)
    model.eval()  # no dropout
    parameters = list(model.parameters())
    matrices = [p for p in parameters if decay_all or p.dim() == 2]
    others = [p for p in parameters if not decay_all and p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=DECAY,
    )
    found, norms = [], []
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        loss = mean_loss(model, train_runs.batch(tokens, step, BATCH, SEED, shuffle))
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, CLIP)))
        optimizer.step()
        found.append(loss.item())
    return found, norms, model


OPTIONS = [
    *("--steps", STEPS, "--batch", BATCH, "--sequence", SEQUENCE, "--seed", SEED, "--lr", LR),
    *("--warmup", WARMUP, "--min-lr-ratio", RATIO, "--weight-decay", DECAY, "--clip", CLIP),
    "--no-dropout",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_torch(family, models, data, tokens, tmp_path):
    log, output = tmp_path / "log.jsonl", tmp_path / "out"
    run("--model", models[family], "--data", data, "--val", data, "--val-batches", 0, *OPTIONS,
        "--output", output, "--log", log)  # fmt: skip
    wanted, norms, model = train_in_torch(models[family], tokens)
    found = losses(log)
    assert len(found) == STEPS
    assert found[-1] < found[0] - 0.5  # the model learns, so the compared curves are not flat
    assert max(norms) > CLIP > min(norms) or min(norms) > CLIP
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    steps = [line for line in read_log(log) if "loss" in line]
    np.testing.assert_allclose([s["gradient_norm"] for s in steps], norms, rtol=1e-3)
    np.testing.assert_allclose(
        [s["lr"] for s in steps], [schedule(s["step"]) for s in steps], rtol=1e-12
    )

    # transformers loads the written folder and computes the trained model's results.
    loaded, report = type(model).from_pretrained(
        output, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    loaded.eval()
    rows = torch.tensor(tokens[: 20 * SEQUENCE].astype(np.int64)).view(20, SEQUENCE)
    with torch.no_grad():
        torch.testing.assert_close(loaded(rows).logits, model(rows).logits, rtol=0, atol=5e-3)
        count = (len(tokens) - 1) // SEQUENCE // BATCH * BATCH
        whole = np.stack([tokens[i * SEQUENCE : (i + 1) * SEQUENCE + 1] for i in range(count)])
        validation = float(mean_loss(loaded, torch.tensor(whole.astype(np.int64))))
    reported = read_log(log)[-1]
    assert reported["step"] == STEPS
    assert abs(reported["validation_loss"] - validation) < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "weights in MXFP8"])
def test_micro_batches_give_the_same_run(precision, models, data, tmp_path):
    """With quantized weights, micro-batches share the codes of a step. Gradients whose sums differ in the last bit then
    move a few weights to another code, so losses drift apart; with codes of another step they are apart by 0.9."""
    exact, loss_bound, norm_bound = precision == "fp32", 1e-4, 1e-3
    if not exact:
        operands = {"recipe": "bf16", "forward_w": "mxfp8", "dgrad_w": "mxfp8"}
        precision, loss_bound, norm_bound = tmp_path / "policy.json", 0.02, 0.1
        deepwell.PrecisionPolicy("bf16", layers={"*": operands}).save(precision)
    logs = []
    for micro in (4, 2, 1) if exact else (4, 1):
        logs.append(tmp_path / f"{micro}.jsonl")
        run("--model", models["gpt2"], "--data", data, *OPTIONS, "--micro-batch", micro,
            "--precision", precision, "--output", tmp_path / f"out{micro}", "--log", logs[-1])  # fmt: skip
    for log in logs[1:]:
        np.testing.assert_allclose(losses(log), losses(logs[0]), rtol=0, atol=loss_bound)
        norms = [[line["gradient_norm"] for line in read_log(path)] for path in (log, logs[0])]
        np.testing.assert_allclose(*norms, rtol=norm_bound)


def test_same_bits_on_any_number_of_threads(models, data, tmp_path):
    found = []
    for threads in ("1", "2", "5"):
        output = tmp_path / threads
        run("--model", models["llama"], "--data", data, *OPTIONS, "--micro-batch", 2,
            "--output", output, environment={"DEEPWELL_THREADS": threads})  # fmt: skip
        found.append((output / "model.safetensors").read_bytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("precision", ["bf16", "fp8-block", "mxfp8", "nvfp4"])
def test_quantized_linear_layers(precision, models, data, tmp_path):
    """A different function that learns too: losses stay within a tenth of FP32's total decrease."""
    logs = {}
    for name in ("fp32", precision, precision + " again"):
        logs[name] = tmp_path / f"{name}.jsonl"
        run("--model", models["llama"], "--data", data, *OPTIONS, "--precision", name.split()[0],
            "--output", tmp_path / "out", "--overwrite", "--log", logs[name])  # fmt: skip
    full, low, again = (losses(log) for log in logs.values())
    assert low == again and low != full
    fall = np.mean(full[:5]) - np.mean(full[-10:])
    assert abs(np.mean(low[-10:]) - np.mean(full[-10:])) < 0.1 * fall


def test_a_policys_file(models, data, tmp_path):
    """It means what its text says, and a checkpoint resumes with the same text alone."""
    file, kept = tmp_path / "policy.json", tmp_path / "checkpoints"
    policy = {"format": "deepwell.precision", "version": 1, "default": "fp8"}
    logs = [tmp_path / "file.jsonl", tmp_path / "name.jsonl"]
    whole = ["--model", models["llama"], "--data", data, *OPTIONS, "--output", tmp_path / "out",
             "--overwrite"]  # fmt: skip
    file.write_text(json.dumps(policy))
    run(*whole, "--precision", file, "--log", logs[0], "--steps", 5, "--checkpoint", kept)
    run(*whole, "--precision", "fp8", "--log", logs[1], "--steps", 5)
    assert losses(logs[0]) == losses(logs[1])
    file.write_text(json.dumps({**policy, "layers": [{"module": "*.mlp", "precision": "fp32"}]}))
    refused = run(*whole, "--precision", file, "--checkpoint", kept, "--resume", status=1)
    assert "precision is" in refused.stderr and "*.mlp" in refused.stderr
    file.write_text("{}")
    refused = run(*whole, "--precision", file, status=1)
    assert "policy.json: precision policy: format is" in refused.stderr


def test_order_of_the_files_and_decay_of_everything(models, data, tokens, tmp_path):
    log = tmp_path / "log.jsonl"
    run("--model", models["gpt2"], "--data", data, *OPTIONS, "--no-shuffle", "--decay-all",
        "--output", tmp_path / "out", "--log", log)  # fmt: skip
    wanted, _, _ = train_in_torch(models["gpt2"], tokens, shuffle=False, decay_all=True)
    np.testing.assert_allclose(losses(log), wanted, rtol=0, atol=1e-4)


def model_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_in_the_output_is_replaced_only_when_asked(models, data, tmp_path):
    output, checkpoints = tmp_path / "out", tmp_path / "ck"
    output.mkdir()  # an empty folder is not a model
    few = ["--model", models["gpt2"], "--data", data, "--sequence", SEQUENCE, "--steps", 2,
           "--output", output]  # fmt: skip
    run(*few)
    before = model_of(output)
    error = run(*few, "--seed", 1, status=1).stderr
    assert str(output) in error and "--overwrite" in error
    # A resumable job without a checkpoint of its own is treated as a new one.
    again = [*few, "--seed", 1, "--checkpoint", checkpoints, "--resume"]
    assert "--overwrite" in run(*again, status=1).stderr
    assert model_of(output) == before
    run(*again, "--overwrite")
    changed = model_of(output)
    assert changed["model.safetensors"] != before["model.safetensors"]
    run(*again)  # it continues, with the model that it wrote
    assert model_of(output) == changed
    # A file that is not part of a model would be lost: rejected before training, even with --overwrite.
    (output / "notes.txt").write_text("mine")
    log = tmp_path / "log.jsonl"
    error = run(*few, "--overwrite", "--log", log, status=1).stderr
    assert "notes.txt" in error and not log.exists()


def test_longest_sequence_of_learned_positions(models, data, tmp_path):
    few = ["--model", models["gpt2"], "--data", data, "--steps", 2, "--output", tmp_path / "out"]
    run(*few, "--sequence", 24)
    assert "24 positions" in run(*few, "--sequence", 25, status=2).stderr


# ---- data ------------------------------------------------------------------------------------------


def data_in_every_form(folder: Path, tokens: np.ndarray) -> dict[str, list]:
    def llm_c(name, magic, version, kind):
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, len(tokens)
        (folder / name).write_bytes(header.tobytes() + tokens.astype(kind).tobytes())
        return ["--data", folder / name]

    forms = {
        "uint32": ["--data", train_runs.save_tokens(folder / "wide.bin", tokens, "<u4")]
        + ["--token-type", "uint32"],
        "llm.c gpt2": llm_c("gpt2.bin", 20240520, 1, "<u2"),
        "llm.c llama3": llm_c("llama3.bin", 20240801, 7, "<u4"),
    }
    for kind in ("uint16", "int32", "int64"):
        np.save(folder / f"{kind}.npy", tokens.astype(kind))
        forms[kind + ".npy"] = ["--data", folder / f"{kind}.npy"]
    # The cut is between two sequences, so two files give the same sequences.
    cut = 20 * SEQUENCE
    (folder / "parts").mkdir()
    train_runs.save_tokens(folder / "parts" / "a.bin", tokens[: cut + 1])
    np.save(folder / "parts" / "b.npy", tokens[cut:].astype("int32"))
    (folder / "parts" / "readme.txt").write_text("not tokens")
    forms["folder"] = ["--data", folder / "parts"]
    forms["two"] = ["--data", folder / "parts" / "a.bin", "--data", folder / "parts" / "b.npy"]
    return forms


def test_every_form_of_data_is_the_same_data(models, data, tokens, tmp_path):
    few = ["--model", models["gpt2"], "--steps", 3, "--batch", BATCH, "--sequence", SEQUENCE]
    found = {}
    for name, form in {"uint16": ["--data", data], **data_in_every_form(tmp_path, tokens)}.items():
        log = tmp_path / f"{name}.jsonl"
        run(*few, *form, "--log", log, "--output", tmp_path / "out", "--overwrite")
        found[name] = losses(log)
    assert all(f == found["uint16"] for f in found.values()), found


def test_data_that_cannot_be_used(models, data, tokens, tmp_path):
    def refused(path, *more, status=1):
        arguments = ["--model", models["gpt2"], "--steps", 1, "--sequence", SEQUENCE]
        return run(
            *arguments, "--data", path, *more, "--output", tmp_path / "o", status=status
        ).stderr

    bad = tokens.copy()
    bad[123] = VOCABULARY
    error = refused(train_runs.save_tokens(tmp_path / "bad.bin", bad))
    assert "bad.bin" in error and "token 123 " in error and str(VOCABULARY) in error
    np.save(tmp_path / "negative.npy", -tokens.astype("int64"))
    assert "token " in refused(tmp_path / "negative.npy")
    text = tmp_path / "story.txt"
    text.write_text("once upon a time")
    assert "deepwell.tokenize" in refused(text, status=3)
    assert "missing.bin" in refused(tmp_path / "missing.bin")
    wide = train_runs.save_tokens(tmp_path / "wide.bin", tokens + 1, "<u4")
    assert "uint32" in refused(wide)
    assert "odd.bin" in refused(data_of(tmp_path / "odd.bin", b"abc"))
    (tmp_path / "empty").mkdir()
    assert ".npy" in refused(tmp_path / "empty")
    refused(data_of(tmp_path / "few.bin", bytes(2 * SEQUENCE)), status=2)
    refused(data, "--val", data_of(tmp_path / "short.bin", bytes(2 * SEQUENCE + 2)), "--val",
            tmp_path / "nowhere.bin")  # fmt: skip
    truncated = (tmp_path / "negative.npy").read_bytes()[:-3]
    assert "truncated" in refused(data_of(tmp_path / "cut.npy", truncated))
    assert not (tmp_path / "o").exists()


def data_of(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# ---- the command line -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["--steps", "many"], 2, "many"),
        (["--steps", 0], 2, "steps"),
        (["--lr", "nan"], 2, "lr"),
        (["--lr", "-1"], 2, "lr"),
        (["--betas", "0.9"], 2, "0.9"),
        (["--betas", "0.9,1"], 2, "beta2"),
        (["--batch", 4, "--micro-batch", 3], 2, "micro_batch"),
        (["--warmup", 9, "--steps", 8], 2, "warmup"),
        (["--no-such-option"], 2, "--no-such-option"),
        (["--seed"], 2, "--seed"),
        (["--resume"], 2, "--checkpoint"),
        (["--val-every", 3], 2, "--val"),
        (["--precision", "bf17"], 2, "bf17"),
        (["--token-type", "int8"], 2, "int8"),
        (["--precision", "fp8-row"], 3, "fp8-row"),
    ],
)
def test_wrong_usage(arguments, status, named, models, data, tmp_path):
    whole = [
        "--model",
        models["gpt2"],
        "--data",
        data,
        "--sequence",
        SEQUENCE,
        "--output",
        tmp_path / "o",
    ]
    assert named in run(*whole, *arguments, status=status).stderr
    assert not (tmp_path / "o").exists()


def test_missing_options_are_named(models, data, tmp_path):
    assert "--model" in run("--data", data, "--output", tmp_path / "o", status=2).stderr
    assert "--data" in run("--model", models["gpt2"], "--output", tmp_path / "o", status=2).stderr
    assert "--output" in run("--model", models["gpt2"], "--data", data, status=2).stderr
    nowhere = run(
        "--model", tmp_path / "none", "--data", data, "--output", tmp_path / "o", status=1
    )
    assert "none" in nowhere.stderr


def test_dry_run_states_time_and_memory(models, data, tmp_path):
    plan = ["--model", models["llama"], "--data", data, *OPTIONS, "--dry-run"]
    text = run(*plan).stdout
    parameters = sum(p.numel() for p in train_runs.load_model(models["llama"]).parameters())
    assert f"llama, {parameters} parameters" in text
    assert f"{STEPS} steps of {BATCH * SEQUENCE} tokens" in text
    (event,) = [json.loads(line) for line in run(*plan, "--json").stdout.splitlines()]
    assert event["event"] == "plan" and event["parameters"] == parameters
    assert event["memory"]["optimizer"] >= 8 * parameters
    # far too large for this machine, but it is only planned
    huge = [
        "--init",
        "--model",
        "gpt2",
        "--data",
        data,
        "--batch",
        64,
        "--sequence",
        12,
        "--dry-run",
    ]
    assert "124439808 parameters" in run(*huge).stdout


def test_json_and_plain_lines(models, data, tmp_path):
    few = ["--model", models["gpt2"], "--data", data, "--sequence", SEQUENCE, "--steps", 25,
           "--val", data, "--val-every", 10, "--output", tmp_path / "o", "--overwrite"]  # fmt: skip
    events = [json.loads(line) for line in run(*few, "--json").stdout.splitlines()]
    assert [e["event"] for e in events].count("step") == 25
    assert [e["step"] for e in events if e["event"] == "validation"] == [10, 20, 25]
    assert events[0]["event"] == "plan" and events[-1]["event"] == "model"
    lines = run(*few).stdout.splitlines()
    assert [line.split()[1] for line in lines if "tokens/s" in line] == [
        "1/25",
        "10/25",
        "20/25",
        "25/25",
    ]
    assert not any("\r" in line or "\033" in line for line in lines)


def test_one_updating_line_on_a_terminal(models, data, tmp_path):
    few = ["--model", models["gpt2"], "--data", data, "--sequence", SEQUENCE, "--steps", 20,
           "--output", tmp_path / "o", "--overwrite"]  # fmt: skip
    for environment, bold in (({}, True), ({"NO_COLOR": "1"}, False)):
        master, slave = pty.openpty()
        process = subprocess.Popen(
            command(*few), stdout=slave, stderr=slave, env={**os.environ, **environment}
        )
        os.close(slave)
        text = b""
        try:
            while block := os.read(master, 65536):
                text += block
        except OSError:  # the reading end is closed
            pass
        os.close(master)
        assert process.wait(60) == 0, text
        assert b"\r\033[Kstep 20/20" in text
        assert (b"\033[1m" in text) == bold


def test_closed_output_and_full_disks_are_failures(models, data, tmp_path):
    few = ["--model", models["gpt2"], "--data", data, "--sequence", SEQUENCE, "--steps", 5,
           "--output", tmp_path / "o"]  # fmt: skip
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*few), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1 and "without --checkpoint" in done.stderr
    error = run(*few, "--log", "/dev/full", status=1).stderr
    assert "/dev/full" in error and "No space" in error


def test_from_a_configuration_alone(data, tmp_path):
    folder = tmp_path / "config"
    train_runs.config("qwen3").save_pretrained(folder)
    arguments = ["--init", "--model", folder, "--data", data, *OPTIONS]
    assert "safetensors" in run(*arguments[1:], "--output", tmp_path / "o", status=1).stderr
    for name in ("a", "b"):
        run(*arguments, "--output", tmp_path / name, "--log", tmp_path / f"{name}.jsonl")
    run(*arguments, "--seed", SEED + 1, "--output", tmp_path / "c", "--log", tmp_path / "c.jsonl")
    a, b, c = (losses(tmp_path / f"{name}.jsonl") for name in "abc")
    assert a == b and a[0] != c[0]
    assert abs(a[0] - math.log(VOCABULARY)) < 0.5 and a[-1] < a[0] - 0.3
    train_runs.load_model(tmp_path / "a")


def test_dropout_depends_on_the_seed_and_the_step(models, data, tmp_path):
    few = ["--model", models["gpt2"], "--data", data, "--sequence", SEQUENCE, "--steps", 4, "--lr", 0,
           "--no-shuffle", "--batch", 1, "--output", tmp_path / "o", "--overwrite"]  # fmt: skip
    found = {}
    for name, more in {"none": ["--no-dropout"], "a": [], "again": [], "b": ["--seed", 1]}.items():
        run(*few, *more, "--log", tmp_path / f"{name}.jsonl")
        found[name] = losses(tmp_path / f"{name}.jsonl")
    assert found["a"] == found["again"]
    assert all(x != y for x, y in zip(found["a"], found["none"]))
    assert all(x != y for x, y in zip(found["a"], found["b"]))


def test_planning_takes_time_in_proportion_to_the_layers(data, tmp_path):
    """Four times the layers may take eight times the CPU time, not sixteen as if each layer looked at all others."""
    seconds = {}
    for layers in (125, 500):
        folder = tmp_path / str(layers)
        config = train_runs.config("llama")
        config.num_hidden_layers, config.layer_types = layers, None
        config.save_pretrained(folder)
        spent = []
        for _ in range(3 if layers == 125 else 1):
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            run("--init", "--model", folder, "--data", data, "--sequence", SEQUENCE, "--dry-run",
                environment={"DEEPWELL_THREADS": "1"})  # fmt: skip
            spent.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
        seconds[layers] = sorted(spent)[len(spent) // 2]
    assert seconds[500] < 8 * seconds[125], seconds


def test_prediction_of_memory(tmp_path):
    """The largest resident set is at least the memory that is certainly touched, and at most the
    prediction plus memory that it does not count: code that the first step loads, stacks,
    allocators (6 MiB)."""
    folder, data = tmp_path / "config", tmp_path / "tokens.bin"
    config = train_runs.config("gpt2")
    config.n_embd, config.n_layer, config.n_positions, config.vocab_size = 256, 4, 128, 8000
    config.save_pretrained(folder)
    train_runs.save_tokens(data, np.random.default_rng(0).integers(0, 8000, 20000))
    for more in ([], ["--micro-batch", 4]):
        events = run("--init", "--model", folder, "--data", data, "--steps", 2, "--sequence", 128,
                     "--batch", 16, *more, "--output", tmp_path / "o", "--overwrite", "--json").stdout  # fmt: skip
        events = [json.loads(line) for line in events.splitlines()]
        predicted = events[0]["memory"]["predicted_peak"]
        used = max(e["memory_peak"] for e in events if e["event"] == "step")
        assert predicted > 100 << 20
        assert 0.85 * predicted < used < predicted + (6 << 20), (predicted, used)


def test_little_address_space_is_an_error(tmp_path):
    """If any mapping fails, oneDNN's generated code included, the run ends by itself with a message."""
    folder, data = tmp_path / "config", tmp_path / "tokens.bin"
    train_runs.config("gpt2").save_pretrained(folder)
    train_runs.save_tokens(data, train_runs.random_tokens(500))
    words = train_runs.command("--init", "--model", folder, "--data", data, "--steps", 1,
                               "--sequence", 16, "--batch", 4, "--output", tmp_path / "o")  # fmt: skip
    ended = []
    for megabytes in range(40, 128, 4):
        limit = megabytes << 20
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "DEEPWELL_THREADS": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        )
        if done.returncode == 127:  # the loader had no memory for the libraries
            continue
        assert done.returncode in (0, 1), (megabytes, done.returncode, done.stderr)
        assert done.returncode == 0 or done.stderr.startswith("deepwell: "), done.stderr
        ended.append(done.returncode)
    assert 0 in ended and 1 in ended


# ---- text ------------------------------------------------------------------------------------------


def tokenizer_folder(folder: Path) -> Path:
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>"
    ).save_pretrained(folder)
    return folder


def tokenize(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "deepwell.tokenize", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_text_becomes_tokens(tmp_path, monkeypatch, capsys):
    import deepwell.tokenize
    import transformers

    folder = tokenizer_folder(tmp_path / "model")
    text = Path(__file__).read_text()
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text('{"text": "one\\n"}\n\n{"text": "two"}\n')
    output = tmp_path / "tokens.bin"
    said = tokenize(
        "--model", folder, tmp_path / "a.txt", tmp_path / "b.jsonl", "-o", output
    ).stdout
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = [
        t for document in (text, "one\n", "two") for t in [*reference(document)["input_ids"], 0]
    ]
    assert np.fromfile(output, "<u2").tolist() == wanted
    assert f"{len(wanted):,} tokens" in said

    # In pieces: this tokenizer splits at the ends of lines between words as well; elsewhere the
    # text is the same.
    monkeypatch.setattr(deepwell.tokenize, "PIECE", 100)
    lines = "\n".join(text.split())
    for name, content in (("lines", lines), ("indented", text), ("unbroken", "ab" * 3000)):
        (tmp_path / name).write_text(content)
        output = tmp_path / f"{name}.npy"
        deepwell.tokenize.tokenize(reference, [str(tmp_path / name)], output)
        made = np.load(output)
        assert made.dtype == np.uint16
        assert reference.decode(made[:-1]) == content
        if name == "lines":
            assert made.tolist() == [*reference(content)["input_ids"], 0]

    broken = tmp_path / "c.jsonl"
    broken.write_text('{"text": "fine"}\n{"txt": 1}\n')
    for model, named in ((folder, "line 2"), (tmp_path / "nowhere", "nowhere")):
        arguments = ["--model", str(model), str(broken), "-o", str(tmp_path / "c.bin")]
        assert deepwell.tokenize.main(arguments) == 1
        assert named in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir() if "bin" in p.name) == ["tokens.bin"]


def test_the_models_python_code_is_not_run(tmp_path):
    folder, marker = tokenizer_folder(tmp_path / "model"), tmp_path / "it-has-run"
    (folder / "own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PreTrainedTokenizerFast\n"
        f"Path({str(marker)!r}).touch()\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.update(tokenizer_class="Own", auto_map={"AutoTokenizer": [None, "own.Own"]})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "deepwell.tokenize"]
        + ["--model", folder, "-", "-o", tmp_path / "tokens.bin"],
        input="y\nyes\n" * 4,  # the text, and an answer to a question about the code
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert not marker.exists()
    assert done.returncode == 1
    assert done.stdout == "" and "Python code" in done.stderr and str(folder) in done.stderr


def test_help_of_tokenize_imports_neither_torch_nor_transformers(tmp_path):
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    done = subprocess.run(
        [sys.executable, "-m", "deepwell.tokenize", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "--model" in done.stdout


# ---- plans ------------------------------------------------------------------------------------------


def plan_of(folder, path, hardware, *more, status=0):
    """Writes the plan of a model for 6 sequences of 16 tokens."""
    words = [
        "plan",
        "--model",
        folder,
        "--hardware",
        hardware,
        "--seq-len",
        SEQUENCE,
        "--global-batch",
        6,
    ]
    done = subprocess.run(
        [find_program(), *map(str, words), "-o", path, *more],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    return path


@pytest.mark.parametrize("hardware", ["h200:1", {"name": "host", "gpus": 0, "host_memory": 8e9}])
def test_a_plan_gives_the_options_that_are_not_given(models, data, tmp_path, hardware):
    """The same losses as by options, for a GPU's plan and a CPU's; an option wins."""
    if not isinstance(hardware, str):
        (tmp_path / "host.json").write_text(json.dumps(hardware))
        hardware = str(tmp_path / "host.json")
    plan = plan_of(models["llama"], tmp_path / "plan.json", hardware)
    common = ["--model", models["llama"], "--data", data, "--steps", 3, "--device", "cpu"]
    by_options = ["--sequence", SEQUENCE, "--batch", 6, "--micro-batch", 3]
    by_options += ["--precision", "bf16" if hardware == "h200:1" else "fp32"]
    for name, words in (("a", by_options), ("b", ["--plan", plan, "--micro-batch", 3])):
        run(*common, *words, "--log", tmp_path / f"{name}.log", "--checkpoint", tmp_path / name)
    assert losses(tmp_path / "a.log") == losses(tmp_path / "b.log")
    written = json.loads(plan.read_text())
    if "version" not in written:  # Python's HostPlan.to_json() has the same fields in "layout"
        plan.write_text(json.dumps({"model": "", "layout": written}))
        run(*common, "--plan", plan, "--dry-run")


@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "host"])
def test_a_plan_that_does_not_fit(models, data, tmp_path, gpu):
    """`deepwell plan` writes the nearest layout and fails; training by it is refused, and its options are told."""
    host = tmp_path / "host.json"
    host.write_text(json.dumps({"name": "host", "gpus": 0, "host_memory": 1e5}))
    name = "h200:1" if gpu else host
    rows = 1 << 24
    more = ["--seq-len", 60, "--global-batch", rows]
    more += ["--set", f"micro_batch={rows}", "recompute=none", "offload=none"]
    plan = plan_of(
        models["llama"], tmp_path / "plan.json", name, *map(str, more if gpu else ()), status=1
    )
    words = ["--model", models["llama"], "--data", data, "--plan", plan, "--dry-run"]
    error = run(*words, status=1).stderr
    assert "is for a run that does not fit the memory" in error
    sizes = f"{SEQUENCE} --batch 6 --micro-batch 1"
    if gpu:
        sizes = f"60 --batch {rows} --micro-batch {rows}"
    ending = "bf16 --device cuda" if gpu else "fp32 --device cpu"
    assert error.endswith(f"instead of --plan: --sequence {sizes} --precision {ending}\n")
    if not gpu:  # those options train; Python's HostPlan.to_json() says "fits" at the same place
        fields = json.loads(plan.read_text())
        plan.write_text(json.dumps({"model": "", "layout": fields, "fits": False}))
        assert "does not fit the memory" in run(*words, status=1).stderr
        options = error.split("instead of --plan: ")[1].split()
        run(*words[:4], *options, "--dry-run")


@pytest.mark.parametrize(
    ("hardware", "more", "status", "named"),
    [
        ("h200:8", ["--set", "dp=8", "micro_batch=1"], 3, "is for 8 GPUs"),
        ("h200:1", ["--set", "recompute=full"], 3, "recompute full"),
        ("h200:1", ["--precision", "fp8-row"], 3, "fp8-row"),
    ],
)
def test_plans_that_train_cannot_run(models, data, tmp_path, hardware, more, status, named):
    batch = ["--global-batch", "8"] if hardware.endswith("8") else []
    plan = plan_of(models["llama"], tmp_path / "plan.json", hardware, *batch, *more)
    words = ["--model", models["llama"], "--data", data, "--output", tmp_path / "o"]
    assert named in run("--plan", plan, *words, status=status).stderr
    other = plan_of(models["llama"], tmp_path / "one.json", "h200:1")
    words[1] = models["gpt2"]
    assert "plan for this model" in run("--plan", other, *words, status=1).stderr
    (tmp_path / "bad.json").write_text("{}")
    assert "lacks seq_len" in run("--plan", tmp_path / "bad.json", *words, status=1).stderr
