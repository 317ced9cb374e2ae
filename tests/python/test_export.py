"""Exported models generate what transformers generates, with their own tokenizer, from Python, C and the program."""

import json
import math
import os
import re
import subprocess
from pathlib import Path

import deepwell as dw
import pytest
import torch
from deepwell import _deepwell
from program import PROGRAM, run
from test_tokenizer import trained
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 211
_LLAMA = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.3,  # so that logits differ clearly
    bos_token_id=None,
    eos_token_id=None,
)
_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def gpt2(**changes):
    sizes = dict(
        vocab_size=VOCABULARY,
        n_embd=24,
        n_layer=2,
        n_head=3,
        n_positions=160,
        initializer_range=0.3,
    )
    return GPT2LMHeadModel(
        GPT2Config(**{**sizes, "bos_token_id": None, "eos_token_id": None, **changes})
    ).eval()


FAMILIES = {
    "gpt2": gpt2,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_LLAMA, rope_parameters=_LLAMA3_ROPE)).eval(),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_LLAMA, head_dim=16)).eval(),
    "qwen3 with windows": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **_LLAMA,
            head_dim=16,
            use_sliding_window=True,
            sliding_window=9,
            layer_types=["full_attention", "sliding_attention"],
        )
    ).eval(),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_LLAMA, sliding_window=12)).eval(),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _greedy(model, ids, count):
    """transformers takes ids equal to the padding for padding, unless there is a mask."""
    options = dict(do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids))
    return model.generate(ids, max_new_tokens=count, **options)


def _relative_error(logits, exact):
    return ((logits.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family, tmp_path):
    model = FAMILIES[family]()
    artifact = dw.export(model, tmp_path / "model.engine")
    # One token; a chunk that is filled up; one that is not; two, to the last position of GPT-2's table.
    for length in (1, 7, 65, 144):
        ids = torch.randint(VOCABULARY, (1, length))
        expected = _greedy(model, ids, 16)
        assert torch.equal(artifact.generate(ids, 16), expected)
    with torch.no_grad():
        exact = model.double()(expected).logits
    # The error of a sum of n products in FP32 is about sqrt(n) roundings, over a few layers.
    assert _relative_error(artifact.logits(expected), exact) < 64 * 2.0**-24 * math.sqrt(
        _LLAMA["hidden_size"]
    )


def test_a_batch_is_continued_row_by_row(tmp_path):
    model = gpt2(eos_token_id=5)
    model.generation_config.eos_token_id = [5, 7]
    artifact = dw.export(model, tmp_path / "model.engine")
    ids = torch.randint(10, VOCABULARY, (4, 5))
    expected = model.generate(
        ids, max_new_tokens=60, do_sample=False, pad_token_id=5, attention_mask=torch.ones_like(ids)
    )
    assert artifact.end_tokens == [5, 7]
    assert torch.equal(artifact.generate(ids, 60), expected)
    assert artifact.generate(ids[0].tolist(), 60, ignore_end=True)[:10] == expected[0][:10].tolist()
    assert artifact.logits(ids).shape == (4, 5, VOCABULARY)


def test_text(tmp_path):
    tokenizer = trained("llama3")
    model = gpt2(vocab_size=tokenizer.get_vocab_size())
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    artifact = dw.export(model, tmp_path / "model.engine", tokenizer=wrapped)
    text = "The engine's 12345 plans: 日本"
    ids = tokenizer.encode(text).ids
    assert artifact.encode(text) == ids
    assert artifact.decode(ids) == text
    expected = _greedy(model, torch.tensor([ids]), 20)[0, len(ids) :]
    assert artifact.generate(text, 20) == tokenizer.decode(
        expected.tolist(), skip_special_tokens=True
    )

    received = []
    artifact.generate(text, 20, on_token=lambda id: received.append(id) or len(received) == 3)
    assert received == expected[:3].tolist()
    with pytest.raises(ZeroDivisionError):
        artifact.generate(text, 20, on_token=lambda id: 1 / 0)

    with pytest.raises(dw.DeepwellError, match="after its on_token has returned"):
        artifact.generate(text, 20, on_token=lambda id: artifact.generate(text, 1))

    # The program prints the same text, and reads the prompt from its input or an option.
    result = run("run", tmp_path / "model.engine", "--prompt", text, "--max-tokens", "20", "--json")
    report = json.loads(result.stdout)
    assert report["prompt_tokens"] == ids
    assert report["tokens"] == expected.tolist()
    assert report["text"] == artifact.generate(text, 20)
    result = run(
        "run", tmp_path / "model.engine", "--tokens", ",".join(map(str, ids)), "--max-tokens", "20"
    )
    assert [int(id) for id in result.stdout.split()] == expected.tolist()


def test_text_of_incomplete_characters(tmp_path):
    """The program and Python replace the same bytes: here the first two of three, again and again."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    first, second = "\u00e6", "\u0139"  # the letters of bytes 0xE6 and 0x97
    vocabulary = {letter: id for id, letter in enumerate(letters)} | {first + second: len(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(first, second)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    model = gpt2(vocab_size=len(vocabulary))
    with torch.no_grad():  # the last token has the largest logit everywhere
        embedding = model.transformer.wte.weight
        embedding[-1] *= 10
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(embedding[-1])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    artifact = dw.export(model, tmp_path / "model.engine", tokenizer=wrapped)
    result = run("run", tmp_path / "model.engine", "--prompt", "a", "--max-tokens", "3", "--json")
    assert json.loads(result.stdout)["text"] == "\ufffd" * 3 == artifact.generate("a", 3)


def test_sampling_follows_the_probabilities(tmp_path):
    artifact = dw.export(gpt2(vocab_size=11), tmp_path / "model.engine")
    prompt, count = [1, 2, 3], 1500
    logits = artifact.logits(prompt)[-1].double()

    def frequencies(**options):
        ids = [artifact.generate(prompt, 1, seed=seed, **options)[-1] for seed in range(count)]
        return torch.bincount(torch.tensor(ids), minlength=11) / count

    probabilities = torch.softmax(logits / 1.5, 0)
    # Five standard deviations of a frequency.
    assert (frequencies(temperature=1.5) - probabilities).abs().max() < 5 * 0.5 / math.sqrt(count)
    kept = logits.topk(3).indices
    assert set(frequencies(temperature=5.0, top_k=3).nonzero().flatten().tolist()) == set(
        kept.tolist()
    )
    order = probabilities.argsort(descending=True)
    nucleus = order[: int((probabilities[order].cumsum(0) < 0.6).sum()) + 1]
    assert set(frequencies(temperature=1.5, top_p=0.6).nonzero().flatten().tolist()) == set(
        nucleus.tolist()
    )
    text = artifact.generate(prompt, 30, temperature=1.0, seed=4)
    assert text == artifact.generate(prompt, 30, temperature=1.0, seed=4)
    assert text != artifact.generate(prompt, 30, temperature=1.0, seed=5)
    with pytest.raises(dw.DeepwellError, match="top_p is 0; expected above 0"):
        artifact.generate(prompt, 1, temperature=1.0, top_p=0.0)


def test_types_of_files(tmp_path):
    model = gpt2().to(torch.bfloat16)
    artifact = dw.export(model, tmp_path / "model.engine")
    ids = torch.randint(VOCABULARY, (1, 20))
    exact = model.double()(ids).logits
    assert artifact.dtype == "bf16"
    assert _relative_error(artifact.logits(ids), exact) < 1e-5  # computed in FP32
    in_bf16 = dw.load_engine(tmp_path / "model.engine", dtype="bf16")
    assert 1e-4 < _relative_error(in_bf16.logits(ids), exact) < 0.1
    assert dw.export(model.float(), tmp_path / "half.engine", dtype="f16").dtype == "f16"
    with pytest.raises(dw.UnsupportedError, match="weights are f16"):
        dw.load_engine(tmp_path / "half.engine", dtype="bf16").generate([1], 1)


def test_rounded_linear_layers(tmp_path):
    """The error lies within the steps of the formats."""
    model = FAMILIES["llama"]()
    ids = torch.randint(VOCABULARY, (1, 20))
    exact = model.double()(ids).logits
    for precision, low, high in [("bf16", 1e-4, 0.05), ("mxfp8", 5e-3, 0.5), ("nvfp4", 5e-3, 2.0)]:
        artifact = dw.export(model, tmp_path / "model.engine", precision=precision)
        assert artifact.precision == precision
        assert low < _relative_error(artifact.logits(ids), exact) < high
    with pytest.raises(dw.DeepwellError, match="no policy|unknown|fp32"):
        dw.export(model, tmp_path / "other.engine", precision="other")


def test_an_emulated_gpu(tmp_path):
    model = MistralForCausalLM(
        MistralConfig(**{**_LLAMA, "num_hidden_layers": 1}, sliding_window=4)
    ).eval()
    dw.export(model, tmp_path / "model.engine")
    ids = torch.randint(VOCABULARY, (1, 6))
    artifact = dw.load_engine(tmp_path / "model.engine", device="emulator:sm_90a")
    try:
        assert torch.equal(artifact.generate(ids, 3), _greedy(model, ids, 3))
        # Entries of the cache that are no multiple of 16 bytes.
        model = gpt2(n_embd=6, n_head=1, n_layer=1)
        dw.export(model, tmp_path / "model.engine")
        artifact = dw.load_engine(tmp_path / "model.engine", device="emulator:sm_90a")
        assert torch.equal(artifact.generate(ids, 3), _greedy(model, ids, 3))
    except dw.UnsupportedError as error:
        pytest.skip(str(error))


def test_optimized_models_holders_and_folders(tmp_path):
    model = gpt2()
    ids = [3, 1, 4]
    expected = dw.export(model, tmp_path / "plain.engine").generate(ids, 5)
    model.save_pretrained(tmp_path / "folder")
    trained("gpt2").save(str(tmp_path / "folder" / "tokenizer.json"))
    assert dw.export(tmp_path / "folder", tmp_path / "folder.engine").generate(ids, 5) == expected
    assert dw.load_engine(tmp_path / "folder.engine").has_tokenizer

    class Engine:
        pass

    compiled = torch.nn.Module()  # as torch.compile wraps a model
    compiled._orig_mod = model
    artifact = dw.export(torch.nn.parallel.DataParallel(compiled), tmp_path / "wrapped.engine")
    assert artifact.generate(ids, 5) == expected

    engine = Engine()
    engine.model = dw.optimize(model, verbose=False)
    artifact = dw.export(engine, tmp_path / "optimized.engine")
    assert artifact.generate(ids, 5) == expected
    assert artifact.config["n_embd"] == 24
    assert "gpt2" in repr(artifact)


def test_what_cannot_be_exported(tmp_path):
    with pytest.raises(dw.UnsupportedError, match="Linear is not a Hugging Face model"):
        dw.export(torch.nn.Linear(2, 2), tmp_path / "x")
    with pytest.raises(dw.UnsupportedError, match="language-model head"):
        dw.export(GPT2Model(gpt2().config), tmp_path / "x")
    with pytest.raises(dw.UnsupportedError, match="meta device"):
        dw.export(gpt2().to("meta"), tmp_path / "x")
    with pytest.raises(dw.UnsupportedError, match="tokenizer is int"):
        dw.export(gpt2(), tmp_path / "x", tokenizer=3)
    with pytest.raises(dw.DeepwellError, match='dtype is "f8"; expected f32, bf16 or f16'):
        dw.export(gpt2(), tmp_path / "x", dtype="f8")
    assert os.listdir(tmp_path) == []
    artifact = dw.export(gpt2(), tmp_path / "model.engine")
    with pytest.raises(ValueError, match="no tokenizer: pass ids"):
        artifact.generate("text")
    with pytest.raises(IndexError, match="token 1 is 211; expected 0 to 210"):
        artifact.generate([0, 211])
    with pytest.raises(dw.DeepwellError, match="the prompt has no tokens"):
        artifact.generate([])
    with pytest.raises(dw.DeepwellError, match="longer than the model's 160 positions"):
        artifact.generate([1] * 161)
    assert (
        len(artifact.generate([1] * 158, 10)) == 161
    )  # the token behind the last position is not read again


def test_program(tmp_path):
    gpt2().save_pretrained(tmp_path / "model")
    file = tmp_path / "model.engine"
    result = run("export", "--checkpoint", tmp_path / "model", "-o", file, "--json")
    report = json.loads(result.stdout)
    assert report["model"] == "gpt2" and report["dtype"] == "f32" and not report["tokenizer"]
    assert report["bytes"] == file.stat().st_size
    (tmp_path / "model" / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    result = run("export", "--checkpoint", tmp_path / "model", "-o", tmp_path / "other.engine")
    assert result.returncode == 3 and "model is Unigram" in result.stderr
    assert "--no-tokenizer exports" in result.stderr
    command = ("export", "--checkpoint", tmp_path / "model", "--no-tokenizer")
    assert run(*command, "-o", tmp_path / "other.engine").returncode == 0
    # A folder of checkpoints: the newest one.
    gpt2(n_layer=1).save_pretrained(tmp_path / "run" / "step-000000000009")
    gpt2(n_layer=3).save_pretrained(tmp_path / "run" / "step-000000000010")
    result = run("export", "--checkpoint", tmp_path / "run", "-o", tmp_path / "run.engine")
    assert result.returncode == 0 and dw.load_engine(tmp_path / "run.engine").config["n_layer"] == 3
    sampled = (
        "--tokens",
        "1,2",
        "--temperature",
        "0.9",
        "--top-k",
        "50",
        "--top-p",
        "0.9",
        "--max-tokens",
        "8",
    )
    assert (
        run("run", file, *sampled, "--seed", "1").stdout
        == run("run", file, *sampled, "--seed", "1").stdout
    )
    for arguments, status, message in [
        (("export", "-o", "x"), 2, "needs --checkpoint"),
        (("export", "--checkpoint", tmp_path / "model"), 2, "needs -o"),
        (("export", "--checkpoint", tmp_path / "model", "-o", "x", "--dtype", "f8"), 2, "not 'f8'"),
        (("export", "--checkpoint", tmp_path / "absent", "-o", "x"), 1, "cannot open"),
        (("run",), 2, "needs a file"),
        (("run", file, "--prompt", "a"), 2, "has no tokenizer; give --tokens"),
        (("run", file, "--tokens", "1,x"), 2, "not 'x'"),
        (("run", file, "--tokens", "1", "--top-p", "2"), 2, "--top-p needs a number"),
        (("run", file, "--tokens", "1", "--device", "gpu"), 2, 'no device "gpu"'),
        (("run", file, "--tokens", "1", "--dtype", "bf16"), 3, "weights are f32"),
        (("run", tmp_path / "model/model.safetensors", "--tokens", "1"), 1, "is not an artifact"),
    ]:
        result = run(*arguments)
        assert (result.returncode, message in result.stderr) == (status, True), result.stderr
    assert "Usage: deepwell run" in run("run", "--help").stdout
    assert "Usage: deepwell export" in run("export", "--help").stdout


def _blocks(language):
    page = (ROOT / "docs/export.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def test_examples_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = trained("gpt2")
    model = gpt2(vocab_size=tokenizer.get_vocab_size())
    model.save_pretrained("trained")
    tokenizer.save("trained/tokenizer.json")
    Path("prompt.txt").write_text("Once upon a time\n")
    (shell,), (python,), (program,) = _blocks("sh"), _blocks("python"), _blocks("c")

    path = f"{PROGRAM.parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-ec", shell], env={**os.environ, "PATH": path}, capture_output=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    names = {"model": model, "tokenizer": tokenizer}
    exec(python, names)
    assert names["ids"].shape == (1, 23) and names["logits"].shape[0] == 3

    library = Path(_deepwell.__file__).resolve().parent
    Path("example.c").write_text(program)
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", f"-L{library}"]
    command = ["cc", *flags, "example.c", "-o", "example", "-ldeepwell", f"-Wl,-rpath,{library}"]
    subprocess.run(command, check=True, timeout=60)
    printed = subprocess.run(["./example", "model.engine", "Once upon"], capture_output=True)
    assert printed.returncode == 0
    text = printed.stdout.decode("utf-8", "replace")
    assert text == names["artifact"].generate("Once upon") + "\n"
