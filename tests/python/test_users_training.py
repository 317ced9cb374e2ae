"""Trainers, precision, generation."""

import copy

import pytest
import torch
from torch import nn
from users import BF16_UNIT, Net, close, optimized, pair, rows, same, train_step, uneven
from zoo import llama, small_gpt2


def sentences(count: int) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        ids = torch.randint(1, 199, (6 + index % 3,), generator=generator)
        found.append({"input_ids": ids, "labels": ids.clone(), "unused": index})
    return found


def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
    longest = max(len(one["input_ids"]) for one in batch)

    def padded(name: str, fill: int) -> torch.Tensor:
        return torch.stack(
            [
                torch.nn.functional.pad(one[name], (0, longest - len(one[name])), value=fill)
                for one in batch
            ]
        )

    return {
        "input_ids": padded("input_ids", 0),
        "labels": padded("labels", -100),
        "attention_mask": (padded("labels", -100) != -100).long(),
    }


def run_trainer(model: nn.Module, folder, **options):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        report_to=[],
        logging_steps=1,
        use_cpu=True,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=sentences(18),
        eval_dataset=sentences(3),
        data_collator=collate,
    )
    trainer.train()
    return [
        torch.tensor(record[key])
        for record in trainer.state.log_history
        for key in ("loss", "eval_loss")
        if key in record
    ]


@pytest.mark.slow_emulated
@pytest.mark.support(
    "Trainers", "Hugging Face Trainer: accumulation, padding, eval, saving", "engine"
)
def test_trainer(support, tmp_path) -> None:
    plain, ours = pair(small_gpt2)
    expected = run_trainer(plain, tmp_path / "plain")
    found = run_trainer(ours, tmp_path / "ours")
    assert len(expected) == len(found) == 4
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    loaded = type(plain).from_pretrained(tmp_path / "ours" / "checkpoint-3")
    for (name, a), (_, b) in zip(loaded.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)
    support.check(ours)


@pytest.mark.slow_emulated
@pytest.mark.support("Trainers", "Trainer with bf16=True (autocast)", "engine")
def test_trainer_autocast(support, tmp_path) -> None:
    plain, ours = pair(small_gpt2)
    expected = run_trainer(plain, tmp_path / "plain", bf16=True)
    found = run_trainer(ours, tmp_path / "ours", bf16=True)
    for a, b in zip(found, expected, strict=True):
        close(a, b, "loss", BF16_UNIT)
    support.check(ours)


@pytest.mark.support("Trainers", "Accelerate: prepare, accumulate, clip, unwrap_model", "engine")
def test_accelerate(support) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def use(model):
        AcceleratorState._reset_state(reset_partial_state=True)  # left by another test of precision
        accelerator = Accelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=2)
        prepared, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        )
        for seed in range(4):
            with accelerator.accumulate(prepared):
                accelerator.backward(uneven(prepared(rows(seed))))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator.unwrap_model(prepared) is model
        return model(rows(9))

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support("Trainers", "Accelerate with bf16, unwrapped afterwards", "engine")
def test_accelerate_autocast(support) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def use(model):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        prepared = accelerator.prepare(model)
        accelerator.backward(uneven(prepared(rows())))
        inside = prepared(rows())
        unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert unwrapped is model
        AcceleratorState._reset_state(reset_partial_state=True)
        return inside, model(rows())

    import deepwell

    plain, ours = pair()
    same(plain, ours, use, BF16_UNIT)
    support.check(ours)
    deepwell.restore(ours)
    calls = []
    ours.first.register_forward_hook(lambda *_: calls.append(1))
    close(ours(rows()), plain(rows()))
    assert calls == [1] and "not optimized" in deepwell.summary(ours)


@pytest.mark.support("Precision", "GradScaler without autocast", "engine")
def test_grad_scaler(support) -> None:
    def use(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, 1e38, 1.0):  # the second overflows and is skipped
            optimizer.zero_grad()
            scaler.scale(uneven(model(rows())) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    plain, ours = pair()
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.support("Precision", "torch.autocast, on and off", "engine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(support, dtype) -> None:
    def use(model):
        results = []
        for enabled in (False, True, False):
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                y = model(rows())
                results.append(y.detach())
                uneven(y.float()).backward()
        return results

    plain, ours = pair()
    same(plain, ours, use, BF16_UNIT)
    support.check(ours)


@pytest.mark.support("Precision", "autocast inside a forward, and turned off inside one", "engine")
def test_autocast_inside(support) -> None:
    class Mixed(Net):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.hidden(x)
                with torch.autocast("cpu", enabled=False):
                    h = self.norm(self.second(h.float()))
                return h @ self.first.weight.T

    plain, ours = pair(Mixed)
    same(plain, ours, train_step, BF16_UNIT)
    support.check(ours)


@pytest.mark.support("Precision", "second derivatives of a forward under autocast", "engine")
def test_second_derivative_under_autocast(support) -> None:
    """PyTorch repeats the forward for such a backward, with autocast as it was in the forward."""

    def use(model):
        x = rows().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x).float()
        (slope,) = torch.autograd.grad(uneven(y), x, create_graph=True)
        slope.square().sum().backward()
        return slope.detach()

    plain, ours = pair()
    same(plain, ours, use, BF16_UNIT)
    support.check(ours)


@pytest.mark.support(
    "Precision",
    ".half(), .bfloat16(), .double() and back to float",
    "engine and PyTorch",
    "is torch.float64",
)
def test_conversions(support) -> None:
    def use(model):
        results = [model(rows())]
        for dtype in (torch.bfloat16, torch.float64, torch.float16):
            model.to(dtype)
            results.append(model(rows().to(dtype)))
            model.float()
        return *results, model(rows())

    plain, ours = pair()
    same(plain, ours, use, BF16_UNIT)
    support.check(ours)


@pytest.mark.support("Precision", "a model that is bfloat16 or float16 at optimize", "engine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_from_the_start(support, dtype) -> None:
    def use(model):
        y = model(rows().to(dtype))
        uneven(y).backward()
        return y.detach()

    plain, ours = pair(lambda: Net().to(dtype))
    same(plain, ours, use, BF16_UNIT)
    support.check(ours)


@pytest.mark.support(
    "Precision", ".to('meta'), to_empty and loading", "engine and PyTorch", "on meta"
)
def test_meta(support) -> None:
    plain, ours = pair()
    state = copy.deepcopy(ours.state_dict())
    close(ours(rows()), plain(rows()))
    ours.to("meta")
    assert ours(rows().to("meta")).is_meta
    with pytest.raises(RuntimeError, match="meta"):
        ours(rows())
    ours.to_empty(device="cpu")
    ours.load_state_dict(state)
    same(plain, ours, train_step)
    support.check(ours)


@pytest.mark.support(
    "Precision", "default dtype and default device contexts", "engine and PyTorch", "default device"
)
def test_defaults(support) -> None:
    class Makes(Net):
        def forward(self, x):
            return super().forward(x) * torch.full((1,), 0.1).to(x.dtype)

    def use(model):
        x = rows()
        results = [model(x)]
        with torch.device("cpu"):
            results.append(model(x))
        torch.set_default_dtype(torch.float64)
        try:
            results.append(model(x))
        finally:
            torch.set_default_dtype(torch.float32)
        return results

    plain, ours = pair(Makes)
    same(plain, ours, use)
    plain, net = pair()
    close(net(rows()), plain(rows()))
    x = rows()
    with torch.device("meta"):
        assert net(x).device.type == "cpu"
    support.check(ours, net)


@pytest.mark.support(
    "Generation", "generate(): greedy, sampling, beams", "PyTorch", "key-value cache"
)
@pytest.mark.parametrize(
    "family", [small_gpt2, lambda: llama(num_hidden_layers=1)], ids=["gpt2", "llama"]
)
def test_generate(family, support) -> None:
    ids = torch.randint(1, 199, (2, 5), generator=torch.Generator().manual_seed(1))
    kinds = [
        {"do_sample": False},
        {"do_sample": True, "top_k": 20},
        {"do_sample": False, "num_beams": 2},
        {"do_sample": False, "cache_implementation": "static"},
    ]

    def use(model):
        model.eval()
        mask = torch.ones_like(ids)
        return [
            model.generate(ids, attention_mask=mask, max_new_tokens=5, pad_token_id=0, **kind)
            for kind in kinds
        ]

    plain, ours = pair(family)
    same(plain, ours, use)
    support.check(ours)


@pytest.mark.slow_emulated
@pytest.mark.support(
    "Generation",
    "generate() first, training after; without a cache",
    "engine and PyTorch",
    "key-value cache",
)
def test_generate_then_train(support) -> None:
    ids = torch.randint(1, 199, (2, 5), generator=torch.Generator().manual_seed(1))

    def use(model):
        results = [model.eval().generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)]
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        return *results, loss.detach()

    plain, ours = pair(small_gpt2)
    same(plain, ours, use)
    generate = dict(max_new_tokens=3, do_sample=False, pad_token_id=0, use_cache=False)
    expected = plain.eval().generate(ids, **generate)
    assert torch.equal(ours.eval().generate(ids, **generate), expected)
    support.check(ours)


@pytest.mark.slow_emulated
@pytest.mark.support(
    "Generation",
    "output_attentions, output_hidden_states, use_cache, by call and by config",
    "engine",
)
def test_output_flags(support) -> None:
    ids = torch.randint(1, 199, (2, 5), generator=torch.Generator().manual_seed(1))

    def use(model):
        results = []
        for flags in (
            {},
            {"output_hidden_states": True},
            {"use_cache": False},
            {"return_dict": False},
        ):
            found = model(input_ids=ids, **flags)
            results.append(found[0])
            results.append(sorted(found.keys()) if hasattr(found, "keys") else len(found))
        model.config.output_hidden_states = True
        results.append(len(model(input_ids=ids).hidden_states))
        model.config.output_hidden_states = False
        results.append(model(input_ids=ids).hidden_states is None)
        return results

    plain, ours = pair(lambda: small_gpt2().eval())
    same(plain, ours, use)
    support.check(ours)


def test_optimized_reports_the_same_loss_as_measured() -> None:
    """The measured path (no DEEPWELL_MEASURE) gives the same values, whichever backend runs."""
    plain = Net()
    ours = optimized(plain)
    same(plain, ours, train_step)
