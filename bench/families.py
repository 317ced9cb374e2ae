"""Measures forward + backward of a mid-size model of each family (docs/models.md), PyTorch and Deepwell in turns.

    python bench/families.py [FAMILY ...] [--rounds N] [--attention sdpa|eager]

FP32, four layers, batch 4, length 256 (images: 197 patches and class token). The models are larger versions of those in
tests/python/zoo_families.py. The figures are medians of interleaved rounds, as in training.py.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "python"), str(Path(__file__).parent)]

import deepwell  # noqa: E402
import torch  # noqa: E402
import zoo_families  # noqa: E402
from training import prepared, seconds  # noqa: E402

BATCH, LENGTH = 4, 256
_LARGER = dict(
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=6,
    vocab_size=8192,
    max_position_embeddings=512,
)
_CHANGES = {
    "opt": dict(
        hidden_size=384,
        ffn_dim=1536,
        num_hidden_layers=4,
        num_attention_heads=6,
        vocab_size=8192,
        max_position_embeddings=512,
        word_embed_proj_dim=384,
    ),
    "t5": dict(
        d_model=384,
        d_kv=64,
        d_ff=1024,
        num_layers=4,
        num_heads=6,
        vocab_size=8192,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
    ),
    "vit": dict(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=6,
        image_size=224,
        patch_size=16,
        num_labels=1000,
    ),
}


def build(name: str, attention: str | None) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    changes = dict(_CHANGES.get(name, _LARGER))
    options = zoo_families.BY_FAMILY[name].options
    if "head_dim" in options:
        changes.update(head_dim=64)
    if "query_pre_attn_scalar" in options:
        changes.update(query_pre_attn_scalar=64)
    if "sliding_window" in options:
        changes.update(sliding_window=64)
    if "layer_types" in options:
        changes.update(layer_types=["sliding_attention", "full_attention"] * 2)
    if attention is not None and name != "gemma2":  # gemma2 supports only this implementation
        changes.update(attn_implementation=attention)
    model = zoo_families.build(name, **changes).train()
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return model, {
            "pixel_values": torch.randn(BATCH, 3, 224, 224, generator=generator),
            "labels": torch.randint(0, 1000, (BATCH,), generator=generator),
        }
    ids = torch.randint(1, 8192, (BATCH, LENGTH), generator=generator)
    classes = name == "bert-classes"
    return model, {"input_ids": ids, "labels": ids[:, 0] % 3 if classes else ids.clone()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="all by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--attention", choices=["sdpa", "eager"])
    options = parser.parse_args()
    ways = ["eager", "deepwell"]  # PyTorch without and with Deepwell, by training.py's names
    print(f"{'family':14}{'PyTorch ms':>12}{'Deepwell ms':>13}{'speed-up':>10}")
    for name in options.families or list(zoo_families.BY_FAMILY):
        model, data = build(name, options.attention)
        models = {way: copy.deepcopy(model) for way in ways}
        steps = {way: prepared(way, models[way]) for way in ways}

        def forward_backward(way: str) -> float:
            loss = steps[way](**data).loss
            loss.backward()
            models[way].zero_grad(set_to_none=True)
            return loss.item()

        losses = [forward_backward(way) for way in ways]
        assert abs(losses[0] - losses[1]) < 1e-3, losses
        times: dict[str, list[float]] = {way: [] for way in ways}
        for round_ in range(options.rounds + 1):
            for way in ways:
                elapsed = seconds(forward_backward, way)
                if round_ > 0:
                    times[way].append(elapsed)
        unit = models["deepwell"].forward.session.report._units[""]
        assert unit.calls and not unit.fallbacks, deepwell.summary(models["deepwell"])
        before, after = (statistics.median(times[way]) * 1e3 for way in ways)
        print(f"{name:14}{before:12.1f}{after:13.1f}{before / after:9.2f}x", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
