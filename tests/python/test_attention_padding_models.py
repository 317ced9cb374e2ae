"""Hugging Face's models with padded batches: the same results as sdpa, without its mask."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attention_tools import FORWARD, apart, attention_nodes, compiled, seen
from deepwell.attention import functional, huggingface, padding
from test_attention_models import configurations, hugging_face, pair
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")


pytestmark = pytest.mark.usefixtures("attention_on_cpu")


def mask_of(*rows: str) -> torch.Tensor:
    """Makes an attention_mask from one letter per token: x is padding."""
    return torch.tensor([[int(letter != "x") for letter in row] for row in rows])


MASKS = {
    "right": mask_of("....xxxxxxx", "...........", "........xxx"),
    "left": mask_of("xxxxxx.....", "...........", "xxxxxxxxxx."),
    "both sides": mask_of("xx.......xx", "x..........", "..........x"),
    "holes": mask_of("x.xx..x....", "...........", "..xxx......"),
}
SLIDING = {"mistral": 0, "qwen3": 1, "gemma2": 1}  # by name: the number of layers without a window


def well_defined(name, mask, where):
    """Returns the rows with determined results. Rows of a causal model that see no token are
    excluded, and padded rows where tokens are gathered. sdpa gives zeros for the former, the eager
    function of a soft-cap model noise.
    """
    rows = mask.bool()
    if name == "bert":
        return torch.ones_like(rows)
    if where == "holes":
        return rows
    if name == "gemma2":
        return F.pad(rows, (4, 0)).unfold(1, 5, 1).any(-1)  # within a window of 5
    return torch.ones_like(rows)


def results(model, ids, mask, rows, **options):
    """Returns logits of determined rows, and gradients of a loss over the rows without padding."""
    logits = model(input_ids=ids, attention_mask=mask, **options).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids.masked_fill(mask == 0, -100).flatten())
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [torch.where(rows[..., None], logits.detach(), 0.0), *grads]


@pytest.mark.parametrize("where", list(MASKS))
@pytest.mark.parametrize("name", list(configurations()))
@pytest.mark.parametrize("train", [True, False])
def test_families(name, where, train):
    model, _, plain = pair(hugging_face(name).train(train))
    ids, mask = torch.randint(50, (3, 11)), MASKS[where]
    taken = SLIDING.get(name, 2) if where == "holes" else 2
    assert seen(lambda: model(input_ids=ids, attention_mask=mask)).ours == taken
    assert functional.fallbacks["a mask is given as a tensor"] == 2 - taken
    rows = well_defined(name, mask, where)
    both = [results(m, ids, mask, rows) for m in (model, plain)]
    assert apart(*both) < 1e-4
    assert all(g is None or g.isfinite().all() for g in both[0])
    with torch.inference_mode():
        assert seen(lambda: model(input_ids=ids, attention_mask=mask)).ours == taken
        logits = [m(input_ids=ids, attention_mask=mask).logits for m in (model, plain)]
    assert apart(*[[torch.where(rows[..., None], x, 0.0)] for x in logits]) < 1e-4
    assert logits[0].isfinite().all()


def test_each_mask_is_read_once(monkeypatch):
    looks = []
    made = padding.Padding.__init__
    monkeypatch.setattr(padding.Padding, "__init__", lambda *a: looks.append(1) or made(*a))
    model, _, _ = pair(hugging_face("bert"))
    ids = torch.randint(50, (3, 11))
    model(input_ids=ids, attention_mask=MASKS["right"])
    assert len(looks) == 1


def test_fully_masked_rows_are_left_to_pytorch():
    model, _, plain = pair(hugging_face("llama"))
    ids, mask = torch.randint(50, (2, 7)), mask_of("xxxxxxx", "...xxxx")
    assert seen(lambda: model(input_ids=ids, attention_mask=mask)).ours == 0
    both = [[m(input_ids=ids, attention_mask=mask).logits] for m in (model, plain)]
    assert apart(*both) == 0


def test_modified_masks_are_read_again():
    model, _, _ = pair(hugging_face("llama"))
    config, kept = model.config, MASKS["right"].bool()
    options = dict(batch_size=3, q_length=11, kv_length=11, attention_mask=kept, config=config)
    made = huggingface.mask(**options)
    module, q = model.model.layers[0].self_attn, torch.randn(3, 4, 11, 8)
    k = torch.randn(3, 2, 11, 8)

    def runs_ours(mask):
        return seen(lambda: huggingface._attention_as_sdpa(module, q, k, k, mask)).ours == 1

    assert runs_ours(made) and runs_ours(made.detach())
    assert not runs_ours(made.clone()) and not runs_ours(made.expand(3, 4, 11, 11))
    made[0, 0, 3, 0] = False
    assert not runs_ours(made)
    made = huggingface.mask(**options)
    assert runs_ours(made)
    more = huggingface.mask(
        **options, mask_function=lambda b, h, q, k: k <= q, allow_is_causal_skip=False
    )
    assert not runs_ours(more)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mistral", "bert"])
def test_gradient_checkpointing(name, reentrant):
    model, _, plain = pair(hugging_face(name).train())
    ids, mask = torch.randint(50, (3, 11)), MASKS["right"]
    labels = ids.masked_fill(mask == 0, -100)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))

    def step(m):
        m(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()

    mode = seen(lambda: step(model))
    assert mode.ours == 4 and mode.others == 0
    step(plain)
    assert apart([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]) < 1e-5


def test_checkpoint_with_the_mask_as_an_argument():
    """Reentrant checkpoints recompute with another tensor in the same memory. The dropout mask must
    be the same, so our kernel must run again.
    """
    model, _, _ = pair(hugging_face("llama"))
    module = model.model.layers[0].self_attn
    made = huggingface.mask(3, 11, 11, attention_mask=MASKS["left"].bool(), config=model.config)
    q = torch.randn(3, 4, 11, 8, requires_grad=True)
    k = torch.randn(3, 2, 11, 8)

    def attend(q, mask):
        return huggingface._attention_as_sdpa(module, q, k, k, mask, dropout=0.5)[0]

    gradients = []
    for run in (attend, lambda *given: checkpoint(attend, *given, use_reentrant=True)):
        torch.manual_seed(5)
        run(q, made).square().sum().backward()
        gradients.append(q.grad)
        q.grad = None
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma2"])
def test_generation_prefills_with_deepwell(name):
    model, _, plain = pair(hugging_face(name).eval())
    ids = torch.randint(50, (3, 11))
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    options |= dict(attention_mask=MASKS["left"])
    mode = seen(lambda: model.generate(ids, **options))
    assert mode.ours >= 2
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_compiled_models_pass_the_mask_tensor():
    model, _, plain = pair(hugging_face("llama"))
    ids, graphs, mask = torch.randint(50, (3, 11)), [], MASKS["right"]
    options = dict(input_ids=ids, attention_mask=mask, use_cache=False)
    out = compiled(model, graphs)(**options).logits
    assert apart([out], [plain(**options).logits]) < 1e-4
    assert FORWARD not in attention_nodes(graphs)


def test_encoder_and_decoder():
    config = transformers.BartConfig(
        **dict(vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, dropout=0.0),
        **dict(encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64),
        **dict(encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0, bos_token_id=1),
        **dict(eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2),
    )
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="sdpa")
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    model, _, plain = pair(model)
    ids, targets = torch.randint(3, 50, (3, 11)), torch.randint(3, 50, (3, 7))
    for where, mask in MASKS.items():
        options = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=targets)
        options |= dict(decoder_attention_mask=mask_of("....xxx", ".......", "......x"))
        # There are two layers of encoder and two of decoder; each decoder layer has two attentions.
        assert seen(lambda: model(**options)).ours == 6, where
        both = []
        for m in (model, plain):
            logits = m(**options).logits
            grads = torch.autograd.grad(logits.square().mean(), list(m.parameters()))
            both.append([logits.detach(), *grads])
        assert apart(*both) < 1e-4, where


def test_dropout():
    config = configurations()["bert"]
    config.attention_probs_dropout_prob = 0.5
    model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="sdpa")
    model, _, _ = pair(model.train())
    ids = torch.randint(50, (3, 11))

    def out(seed):
        torch.manual_seed(seed)
        return model(input_ids=ids, attention_mask=MASKS["both sides"]).logits

    assert seen(lambda: out(1)).ours == 2
    assert torch.equal(out(1), out(1)) and not torch.equal(out(1), out(2))


def test_copied_models_support_padding():
    model, _, plain = pair(hugging_face("llama"))
    ids, mask = torch.randint(50, (3, 11)), MASKS["left"]
    assert seen(lambda: copy.deepcopy(model)(input_ids=ids, attention_mask=mask)).ours == 2
    assert seen(lambda: plain(input_ids=ids, attention_mask=mask)).ours == 0
