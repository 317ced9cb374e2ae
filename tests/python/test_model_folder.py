"""Models built in C from folders that transformers wrote: they compute the same function, and
transformers reads the folders that they write."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from compare import error_of, gradient_bounds
from deepwell import _deepwell
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 97
SIZES = ((2, 13), (1, 1), (3, 40))


def gpt2(**changes):
    options = dict(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=24,
        n_layer=2,
        n_head=3,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(GPT2Config(**{**options, **changes}))


def _llama_options(changes):
    options = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return {**options, **changes}


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**_llama_options(changes)))


def qwen3(**changes):
    return Qwen3ForCausalLM(Qwen3Config(**_llama_options({"head_dim": 10, **changes})))


def mistral(**changes):
    return MistralForCausalLM(MistralConfig(**_llama_options({"sliding_window": 7, **changes})))


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "gpt2": gpt2,
    "gpt2-scales": lambda: gpt2(
        scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True
    ),
    "gpt2-inner-relu": lambda: gpt2(n_inner=50, activation_function="relu", layer_norm_epsilon=0.1),
    "gpt2-gelu-untied": lambda: gpt2(activation_function="gelu", tie_word_embeddings=False),
    "gpt2-tanh-one-head": lambda: gpt2(activation_function="tanh", n_head=1, n_layer=1),
    "llama": llama,
    "llama-tied-biases": lambda: llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rms_norm_eps=0.01
    ),
    "llama-one-kv-head": lambda: llama(num_key_value_heads=1, head_dim=12, hidden_act="gelu"),
    "llama-padding-row": lambda: llama(pad_token_id=5),
    "llama-rope-linear": lambda: llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
    ),
    "llama-rope-llama3": lambda: llama(rope_parameters=LLAMA3_ROPE, head_dim=24),
    "qwen3": qwen3,
    "qwen3-tied-bias": lambda: qwen3(tie_word_embeddings=True, attention_bias=True),
    "qwen3-windows": lambda: qwen3(
        num_hidden_layers=3, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3-layer-types": lambda: qwen3(
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mistral": mistral,
    "mistral-no-window": lambda: mistral(sliding_window=None),
    "mistral-head-width": lambda: mistral(head_dim=6, num_key_value_heads=4, sliding_window=1),
}


def make(name):
    """Makes every parameter of the model random: ones, zeros and small numbers would hide
    mistakes."""
    torch.manual_seed(len(name))
    model = CASES[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter.dim() == 1) * 0.3)
    return model


@pytest.fixture(params=sorted(CASES))
def saved(request, tmp_path):
    model = make(request.param)
    model.save_pretrained(tmp_path / "model")
    return model, str(tmp_path / "model")


def tokens(batch, length):
    generator = torch.Generator().manual_seed(batch * 100 + length)
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    labels = ids.clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    labels[:, -1] = ids[:, -1]
    return ids, labels


def load(folder, config=None):
    """Returns {name: F32 tensor}, read by dw_model_load."""
    weights = {n: torch.empty(count) for n, count in _deepwell.model_parameters(folder)}
    _deepwell.model_load(folder, [w.data_ptr() for w in weights.values()])
    return weights


def run(graph_json, weights, ids, labels=None, weighting=None):
    """Returns the graph's output, and the gradients of its parameters if `weighting` is the
    gradient of its output."""
    graph = _deepwell.Graph(graph_json)
    wrt = range(len(weights)) if weighting is not None else ()
    assert graph.leaves[: len(weights)] == tuple(weights)
    engine = _deepwell.Engine(graph, [0] if weighting is not None else [], list(wrt))
    plan = engine.plan(list(ids.shape))
    arena = _deepwell.Arena(plan.arena_bytes)
    dtype = next(iter(weights.values())).dtype
    output = torch.full(plan.outputs[0][1], math.nan, dtype=dtype)
    inputs = [ids] if labels is None else [ids, labels]
    leaves = [w.data_ptr() for w in weights.values()] + [i.data_ptr() for i in inputs]
    assert len(leaves) == len(graph.leaves)
    plan.forward((arena.address,), leaves, [output.data_ptr()])
    if weighting is None:
        return output, None
    gradients = {name: torch.full_like(w, math.nan) for name, w in weights.items()}
    weighting = weighting.to(dtype).contiguous()  # kept alive while its memory is read
    plan.backward(
        -1,
        (arena.address,),
        leaves,
        [output.data_ptr()],
        [weighting.data_ptr()],
        [g.data_ptr() for g in gradients.values()],
    )
    return output, gradients


def reference(model, ids, labels):
    """Returns logits, loss, and the gradients of both: of the loss, and of the logits' product with
    a weighting."""
    grads = []
    out = model(input_ids=ids, labels=labels)
    weighting = torch.cos(torch.arange(out.logits.numel(), dtype=torch.float64))
    weighting = weighting.view(out.logits.shape).to(out.logits.dtype)
    for objective in (out.loss, (out.logits * weighting).sum()):
        model.zero_grad()
        objective.backward(retain_graph=True)
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
    return out.logits.detach(), out.loss.detach(), grads, weighting


def check(name, ours, own, exact):
    """Checks that values are within 1e-4 of FP64's norm, or twice the error of FP32 PyTorch."""
    limit = max(1e-4 * exact.norm().item(), 2 * error_of(own, exact))
    error = error_of(ours.view(exact.shape), exact)
    assert error <= limit, f"{name}: {error:.3g} over {limit:.3g}"


def check_gradients(model, ours, own, exact):
    for name, limit in gradient_bounds(model, own, exact).items():
        error = error_of(ours[name].view(exact[name].shape), exact[name])
        assert error <= limit, f"{name}: {error:.3g} over {limit:.3g}"


def test_same_function_as_transformers(saved):
    model, folder = saved
    exact_model = copy.deepcopy(model).double()
    weights = load(folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter.detach().flatten()), name
    assert list(weights) == [name for name, _ in model.named_parameters()]
    graphs = _deepwell.model_graph(folder, loss=True), _deepwell.model_graph(folder)
    for size in SIZES:
        ids, labels = tokens(*size)
        exact_logits, exact_loss, exact_grads, weighting = reference(exact_model, ids, labels)
        own_logits, own_loss, own_grads, _ = reference(model, ids, labels)
        loss, loss_grads = run(graphs[0], weights, ids, labels, torch.ones(()))
        logits, logit_grads = run(graphs[1], weights, ids, weighting=weighting)
        check("logits", logits, own_logits, exact_logits)
        check_gradients(model, logit_grads, own_grads[1], exact_grads[1])
        if size[1] == 1:  # no label is left, so the loss is the mean of nothing
            assert loss.isnan() and own_loss.isnan()
            continue
        check("loss", loss, own_loss, exact_loss)
        check_gradients(model, loss_grads, own_grads[0], exact_grads[0])


@pytest.mark.parametrize("name", ["gpt2", "llama-rope-llama3", "qwen3-windows", "mistral"])
def test_f64_agrees_within_f64_rounding(name, tmp_path):
    """Detects errors that single precision would hide: both rotate positions by F32 angles, and
    everything else is F64."""
    model = make(name)
    model.save_pretrained(tmp_path)
    ids, labels = tokens(2, 13)
    exact = copy.deepcopy(model).double()
    logits, loss, grads, weighting = reference(exact, ids, labels)
    weights = {n: p.detach().flatten().clone() for n, p in exact.named_parameters()}
    ours, our_grads = run(
        _deepwell.model_graph(str(tmp_path), dtype="f64"), weights, ids, weighting=weighting
    )
    # sin and cos of F32 angles may differ by an ulp between libraries: 2^-24 relative
    limit = 1e-12 if name == "gpt2" else 1e-6
    assert error_of(ours, logits) <= limit * logits.norm().item()
    for key, value in grads[1].items():
        assert error_of(our_grads[key].view(value.shape), value) <= limit * value.norm().item(), key


def test_moved_labels_score_every_position(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path)
    ids, _ = tokens(2, 13)
    labels = torch.randint(0, VOCABULARY, ids.shape)
    logits = model(input_ids=ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    graph = _deepwell.model_graph(str(tmp_path), loss=True, labels_moved=True)
    loss, _ = run(graph, load(str(tmp_path)), ids, labels)
    assert abs(loss.item() - expected.item()) < 1e-5


def test_dropout_is_where_transformers_has_it(tmp_path):
    model = gpt2(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3)
    model.save_pretrained(tmp_path / "gpt2")
    nodes = json.loads(_deepwell.model_graph(str(tmp_path / "gpt2"), dropout=True))["nodes"]
    drops = [n for n in nodes if n["attrs"].get("p", 0) > 0]
    found = [(n["op"], n["module"].partition(".h.")[2], n["attrs"]["p"]) for n in drops]
    expected = [("dropout", "", 0.2)]
    for layer in range(2):
        expected += [
            ("attention", f"{layer}.attn", 0.3),
            ("dropout", f"{layer}.attn.resid_dropout", 0.1),
            ("dropout", f"{layer}.mlp.dropout", 0.1),
        ]
    assert found == expected
    assert len({n["attrs"]["stream"] for n in drops}) == len(drops)
    plain = json.loads(_deepwell.model_graph(str(tmp_path / "gpt2")))
    assert not any(n["op"] == "dropout" for n in plain["nodes"])
    assert not any(leaf["role"] == "seed" for leaf in plain["leaves"])


@pytest.mark.parametrize("name", ["gpt2", "llama-tied-biases", "qwen3-windows", "mistral"])
def test_the_captured_graph_has_the_same_operations(name, tmp_path):
    from deepwell.capture import capture_graph

    model = make(name)
    model.config.use_cache = False
    model.save_pretrained(tmp_path)
    ids, _ = tokens(2, 13)
    captured = capture_graph(model, (), {"input_ids": ids})
    built = _deepwell.model_graph(str(tmp_path))

    def counted(text):
        graph = _deepwell.Graph(text)
        for name in ("dead_code", "recognize", "fold", "common", "dead_code"):
            graph.run_pass(name)
        operations = [
            n["op"]
            for n in json.loads(graph.json())["nodes"]
            if not n["module"].endswith("rotary_emb")
        ]
        kinds = (
            "linear",
            "embedding",
            "attention",
            "rope",
            "layer_norm",
            "rms_norm",
            "gelu",
            "swiglu",
        )
        return {kind: operations.count(kind) for kind in kinds}

    assert counted(built) == counted(captured.json)


# ---- folders -----------------------------------------------------------------------------------------------


def save(folder, to, weights, **options):
    _deepwell.model_save(folder, str(to), [w.data_ptr() for w in weights.values()], **options)


def logits_of(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt2-gelu-untied", "llama-tied-biases", "qwen3", "mistral"]
)
def test_transformers_loads_what_is_saved(name, tmp_path):
    model = make(name)
    source, target = tmp_path / "source", tmp_path / "target"
    model.save_pretrained(source)
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    (source / "README.md").write_text("not copied")
    ids, _ = tokens(2, 13)
    weights = load(str(source))
    save(str(source), target, weights, source=str(source))
    assert torch.equal(logits_of(target, ids), model(input_ids=ids).logits)
    assert (target / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert (target / "generation_config.json").read_bytes() == (
        source / "generation_config.json"
    ).read_bytes()
    assert not (target / "README.md").exists()
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, target))
    assert after == before
    assert list(after) == list(before)

    save(str(source), target, weights)  # over the source folder, without the tokenizer
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]


def test_bf16_shards_round_once(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path / "source")
    weights = load(str(tmp_path / "source"))
    save(str(tmp_path / "source"), tmp_path / "target", weights, dtype="bf16", shard_bytes=20000)
    names = sorted(p.name for p in (tmp_path / "target").iterdir())
    assert "model.safetensors.index.json" in names and "model-00002-of-00003.safetensors" in names
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert back.dtype == torch.bfloat16
    ours = load(str(tmp_path / "target"))
    for name, parameter in back.named_parameters():
        rounded = weights[name].bfloat16()
        assert torch.equal(parameter.detach().flatten(), rounded), name
        assert torch.equal(ours[name], rounded.float()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_types_load(dtype, tmp_path):
    model = make("gpt2").to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    weights = load(str(tmp_path))
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter.detach().flatten().float()), name


def test_names_without_the_prefix_and_old_buffers_load(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make("gpt2")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, tmp_path / "model.safetensors")
    weights = load(str(tmp_path))
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter.detach().flatten()), name

    # A head stored beside a tied embedding is read if it is equal, and rejected if not.
    head = bare["wte.weight"].clone()
    save_file({**bare, "lm_head.weight": head}, tmp_path / "model.safetensors")
    load(str(tmp_path))
    head[3, 5] += 1
    save_file({**bare, "lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(_deepwell.Error, match="tie_word_embeddings"):
        load(str(tmp_path))


def test_weights_that_do_not_fit_are_all_named(tmp_path):
    from safetensors.torch import load_file, save_file

    make("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(56, 31)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(56, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(_deepwell.Error) as raised:
        load(str(tmp_path))
    message = str(raised.value)
    assert '"model.norm.weight" is missing' in message
    assert "has the shape [56, 31], expected [56, 32]" in message
    assert '"model.layers.2.mlp.up_proj.weight" is not a parameter of this model' in message


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_refused(bad, tmp_path):
    model = make("qwen3")
    name = "model.layers.1.self_attn.k_norm.weight"
    with torch.no_grad():
        model.get_parameter(name)[4] = bad
    model.save_pretrained(tmp_path)
    with pytest.raises(_deepwell.Error, match="k_norm.weight.* is (NaN|infinite) at element 4"):
        load(str(tmp_path))
    weights = {n: torch.empty(count) for n, count in _deepwell.model_parameters(str(tmp_path))}
    _deepwell.model_load(str(tmp_path), [w.data_ptr() for w in weights.values()], True)
    assert not weights[name][4].isfinite()


def test_saving_keeps_foreign_files(tmp_path):
    make("gpt2").save_pretrained(tmp_path / "source")
    target = tmp_path / "target"
    target.mkdir()
    (target / "thesis.tex").write_text("precious")
    weights = load(str(tmp_path / "source"))
    with pytest.raises(_deepwell.Error, match="thesis.tex.*would be lost"):
        save(str(tmp_path / "source"), target, weights)
    assert (target / "thesis.tex").read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]


def test_a_full_disk_leaves_the_old_folder(tmp_path):
    import resource
    import signal

    make("gpt2").save_pretrained(tmp_path / "source")
    source, target = str(tmp_path / "source"), tmp_path / "target"
    weights = load(source)
    save(source, target, weights)
    before = {p.name: p.read_bytes() for p in target.iterdir()}
    for weight in weights.values():
        weight.add_(1.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (10, 2000, 30000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            with pytest.raises(_deepwell.Error, match="File too large"):
                save(source, target, weights)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert {p.name: p.read_bytes() for p in target.iterdir()} == before
            assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def initialise(folder, seed):
    weights = {n: torch.empty(count) for n, count in _deepwell.model_parameters(folder)}
    _deepwell.model_init(folder, seed, [w.data_ptr() for w in weights.values()])
    return weights


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_random_weights_have_transformers_distribution(family, tmp_path):
    """Checks that mean and deviation of each parameter are within 5 standard errors of
    transformers' distribution."""
    model = {
        "gpt2": lambda: gpt2(n_embd=96, initializer_range=0.05),
        "llama": lambda: llama(hidden_size=96, attention_bias=True, pad_token_id=5),
    }[family]()
    model.save_pretrained(tmp_path)
    weights = initialise(str(tmp_path), 7)
    for name, parameter in model.named_parameters():
        ours, theirs = weights[name].double(), parameter.detach().double().flatten()
        if theirs.std() == 0:
            assert torch.equal(ours, theirs), name
            continue
        deviation = model.config.initializer_range
        if family == "gpt2" and name.endswith("c_proj.weight"):
            deviation /= math.sqrt(2 * model.config.n_layer)
        if name == "model.embed_tokens.weight":
            assert not weights[name].view(parameter.shape)[5].any()
            keep = [row for row in range(VOCABULARY) if row != 5]
            ours = weights[name].double().view(parameter.shape)[keep].flatten()
        error_of_mean = deviation / math.sqrt(len(ours))
        assert abs(ours.mean()) < 5 * error_of_mean, name
        assert abs(ours.std() - deviation) < 5 * error_of_mean / math.sqrt(2), name
        z = (ours / deviation).sort().values
        normal = torch.special.ndtr(z)
        even = (torch.arange(len(z), dtype=torch.float64) + 0.5) / len(z)
        # Kolmogorov and Smirnov's distance exceeds 2.2 / sqrt(n) once in 8,000 times
        assert (normal - even).abs().max() < 2.2 / math.sqrt(len(z)), name
    again, other = initialise(str(tmp_path), 7), initialise(str(tmp_path), 8)
    first = next(iter(weights))
    assert all(torch.equal(weights[n], again[n]) for n in weights)
    assert (weights[first] == other[first]).float().mean() < 0.1


def test_the_catalogue_builds(tmp_path):
    names = ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
    names += ["llama3-8b", "llama3-70b", "llama3-405b", "mistral-7b"]
    names += ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"]
    billions = [0.124, 0.355, 0.774, 1.558, 8.03, 70.55, 405.85, 7.24, 0.596, 1.72, 4.02, 8.19]
    for name, size in zip(names, billions):
        count = sum(elements for _, elements in _deepwell.model_parameters(name))
        assert count == pytest.approx(size * 1e9, rel=0.01), name
        _deepwell.Graph(_deepwell.model_graph(name, loss=True))
    with pytest.raises(_deepwell.Error, match="similar names: .*llama2-7b"):
        _deepwell.model_parameters("llama4")
    with pytest.raises(
        _deepwell.Error, match='"deepseek-v3".*gpt2, llama, qwen3 and mistral are built'
    ):
        _deepwell.model_parameters("DeepSeek-V3")


def test_configurations_of_transformers_4_mean_the_same(tmp_path):
    """Reads rope_theta beside rope_scaling, and torch_dtype: the spelling before version 5."""
    make("llama-rope-llama3").save_pretrained(tmp_path)
    new = _deepwell.model_graph(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert _deepwell.model_graph(str(tmp_path)) == new
    weights = load(str(tmp_path))
    save(str(tmp_path), tmp_path / "target", weights, dtype="f16")
    saved = json.loads((tmp_path / "target" / "config.json").read_text())
    assert saved == {**config, "torch_dtype": "float16"}
