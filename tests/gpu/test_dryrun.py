"""deepwell.dryrun on a Hopper GPU: the predicted peak of a step is PyTorch's count of requested bytes, to the byte, and its
count of allocated bytes is within the rule of docs/dryrun.md. A failure prints what is held in each phase, and the sizes
of the blocks that are there but not predicted or predicted but not there."""

from __future__ import annotations

import collections
import gc
import json

import deepwell as dw
import pytest
import torch
from deepwell import gpu_memory
from torch import nn
from users import engine_calls

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")
VOCABULARY = 50257


@pytest.fixture(autouse=True)
def _the_engine_runs(monkeypatch):
    monkeypatch.setenv("DEEPWELL_MEASURE", "0")
    monkeypatch.setattr(gpu_memory, "_moment", _noted_moment)
    yield
    gc.collect()
    torch.cuda.empty_cache()


_predicted: dict[tuple[str, int], collections.Counter] = {}  # the blocks of the last prediction
_moment = gpu_memory._moment


def _noted_moment(phase, part, held):
    blocks = [size for field in gpu_memory.FIELDS for size in held.get(field, ()) if size]
    _predicted[phase, part] = collections.Counter(blocks)
    return _moment(phase, part, held)


def tokens(rows: int, length: int, vocabulary: int) -> dict:
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


def gpt2_124m():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config()), tokens(4, 256, VOCABULARY)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=32000, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokens(4, 512, 32000)


def tied_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=12,
        num_key_value_heads=12, vocab_size=8000, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokens(3, 200, 8000)


def bert():
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(num_hidden_layers=2))
    call = tokens(4, 128, 30522)
    call["attention_mask"] = torch.ones(4, 128, dtype=torch.long)
    return model, call


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_hidden_layers=2, num_labels=10))
    model.config.problem_type = "single_label_classification"  # otherwise the first call sets it
    return model, {
        "pixel_values": torch.randn(4, 3, 224, 224),
        "labels": torch.tensor([1, 2, 3, 4]),
    }


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=512, d_kv=64, d_ff=1024, num_layers=2, num_heads=8, vocab_size=8000,
                      decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
    return T5ForConditionalGeneration(config), tokens(4, 128, 8000)


class Wide(nn.Module):
    """Layers that are each a part of backward, so that the arena has segments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def wide():
    return Wide(), {"x": torch.randn(1024, 2048)}


OPTIMIZERS = {
    "adamw_dw": lambda p: dw.AdamW(p),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
}


def counters() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {
        name: stats[f"{name}_bytes.all.{when}"]
        for name, when in (("requested", "current"), ("allocated", "current"))
    }


def peaks() -> tuple[int, int]:
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.peak"], stats["allocated_bytes.all.peak"]


def blocks_at_the_peak(history: list[dict], before: collections.Counter) -> collections.Counter:
    """Returns the sizes that were allocated when the most bytes were, from a recorded history of the allocator."""
    held, sizes, now, most, at = {}, before.copy(), 0, 0, before.copy()
    for event in history:
        if event["action"] == "alloc":
            held[event["addr"]] = event["size"]
            now += event["size"]
            sizes[event["size"]] += 1
        elif event["action"] == "free_completed":
            size = held.pop(event["addr"], event["size"])
            now -= size
            sizes[size] -= 1
        if now > most:
            most, at = now, sizes.copy()
    return +at


def breakdown(report: dict, step, measured: list[tuple[int, int]], base: dict) -> str:
    """Runs one more step with a recorded history, and compares its blocks with the predicted moments."""
    lines = [
        f"predicted requested {report['peak_bytes']}, allocated {report['allocated_bytes']} to "
        f"{report['allocated_bytes_most']}, in {report['peak']['phase']} {report['peak']['part']}",
        f"measured per step (requested, allocated), less {base}: {measured}",
        f"differences in requested bytes: {[m[0] - report['peak_bytes'] for m in measured]}",
    ]
    for moment in report["moments"]:
        lines.append("  " + json.dumps({k: v for k, v in moment.items() if v}))
    lines.append(f"  arena {report['arena']['bytes']}, planned on {report['device']}")
    try:
        there = collections.Counter(
            block.get("requested_size", block["size"])
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        )
        torch.cuda.memory._record_memory_history(max_entries=200000, stacks="python")
        step()
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        events = snapshot["device_traces"][torch.cuda.current_device()]
        at = blocks_at_the_peak(events, there)
        predicted = _predicted[report["peak"]["phase"], report["peak"]["part"]]
        lines.append(f"  there and not predicted, by size: {sorted((at - predicted).items())}")
        lines.append(f"  predicted and not there, by size: {sorted((predicted - at).items())}")
        lines.append(f"  blocks before the step, by size: {sorted(there.items())[-60:]}")
        lines.append(f"  blocks at the measured peak, by size: {sorted(at.items())[-80:]}")
        made = collections.Counter(e["size"] for e in events if e["action"] == "alloc")
        lines.append(f"  allocations of the step, by size: {sorted(made.items())[-80:]}")
        for event in [e for e in events if e["action"] == "alloc"][:40]:
            frames = [
                f"{frame['filename'].split('/')[-1]}:{frame['line']}"
                for frame in event.get("frames", [])[:4]
            ]
            lines.append(f"    {event['size']} {' < '.join(frames)}")
    except Exception as error:
        lines.append(f"  no history: {error!r}")
    return "\n".join(lines)


def check(build, dtype: torch.dtype, which: str, accumulate: bool = False) -> dict:
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    torch.cuda.init()  # before it there are no counters
    base = counters()
    model, call = build()
    model = model.to(dtype).train()
    call = {n: v.to(dtype) if v.is_floating_point() else v for n, v in call.items()}
    elsewhere = None
    if build is gpt2_124m and which == "adamw_dw":
        elsewhere = dw.dryrun(model, call, target="sm_90a", optimizer=which, accumulate=accumulate)
    model = model.cuda()
    # Labels that are the ids stay one tensor.
    moved = {id(v): v.cuda() for v in call.values()}
    call = {name: moved[id(v)] for name, v in call.items()}
    del moved
    report = dw.dryrun(model, call, optimizer=which, accumulate=accumulate)
    assert report["target"] == "sm_90a" and report["plan_exact"] and report["fits"]
    dw.optimize(model, verbose=False)
    optimizer = OPTIMIZERS[which](model.parameters())

    def step() -> None:
        result = model(**call)
        loss = result if isinstance(result, torch.Tensor) else result.loss
        del result
        loss.backward()
        optimizer.step()
        if not accumulate:
            optimizer.zero_grad(set_to_none=True)

    measured = []
    for _ in range(3):
        gc.collect()  # what the first call's capture left
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        requested, allocated = peaks()
        measured.append((requested - base["requested"], allocated - base["allocated"]))
    assert engine_calls(model) == (3, 0), dw.summary(model)
    # The first step makes the optimizer's states; what it holds is not more than the others'.
    differences = [requested - report["peak_bytes"] for requested, _ in measured[1:]]
    lowest, most = report["allocated_bytes"], report["allocated_bytes_most"]
    fits = all(lowest <= allocated <= most for _, allocated in measured[1:])
    print(
        f"{build.__name__} {dtype} {which}: predicted {report['peak_bytes']}, requested less that {differences}, "
        f"allocated less {lowest}: {[a - lowest for _, a in measured[1:]]} (at most {most - lowest}); "
        f"in the first step requested {measured[0][0] - report['peak_bytes']}"
    )
    if any(differences) or not fits:
        pytest.fail(breakdown(report, step, measured, base), pytrace=False)
    # A GPU in this machine makes the plan also for a model that is not on it yet.
    if elsewhere is not None:
        assert elsewhere["moments"] == report["moments"]
    return report


@pytest.mark.parametrize("which", list(OPTIMIZERS))
def test_gpt2_124m(which) -> None:
    check(gpt2_124m, torch.bfloat16, which)


@pytest.mark.parametrize(
    "build, dtype",
    [(llama, torch.float32), (llama, torch.bfloat16), (tied_llama, torch.bfloat16),
     (bert, torch.bfloat16), (vit, torch.bfloat16), (t5, torch.bfloat16), (wide, torch.float32)],
)  # fmt: skip
def test_models(build, dtype) -> None:
    check(build, dtype, "adamw_dw")


def test_accumulated_gradients() -> None:
    check(wide, torch.bfloat16, "adamw_fused", accumulate=True)


def test_expandable_segments_leave_no_remainders() -> None:
    """Blocks are then always split, so that the counter of allocated bytes is predicted to the byte too."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        base = torch.cuda.memory_allocated()
        report = check(wide, torch.bfloat16, "adamw_fused")
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated() - base
        assert found == report["allocated_bytes"], (found, report["allocated_bytes"])
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_a_plan_without_the_gpu(monkeypatch) -> None:
    """What a machine without a GPU predicts is at most cuBLASLt's workspace away."""
    from deepwell import step_memory

    model, call = gpt2_124m()
    model = model.bfloat16()
    here = dw.dryrun(model, call, target="sm_90a")
    monkeypatch.setattr(step_memory, "_gpu_here", lambda model: None)
    away = dw.dryrun(model, call, target="sm_90a", hw="h200")
    print(
        f"gpt2 planned without the GPU: {away['peak_bytes'] - here['peak_bytes']} bytes from "
        f"{here['peak_bytes']}, arena {away['arena']['bytes']} and {here['arena']['bytes']}"
    )
    assert here["plan_exact"] and not away["plan_exact"]
    assert abs(away["peak_bytes"] - here["peak_bytes"]) <= 64 << 20
    for one, other in zip(here["moments"], away["moments"]):
        if len(here["moments"]) == len(away["moments"]) and one["phase"] == other["phase"]:
            for field in gpu_memory.FIELDS:
                if field not in ("arena", "gradients", "outputs"):
                    assert one[field] == other[field], field
