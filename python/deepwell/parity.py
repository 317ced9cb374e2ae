"""``deepwell.parity``: does a model train as well in a lower precision as in BF16?

    result = deepwell.parity("gpt2", ["tokens.bin"], precisions=["mxfp8", "nvfp4"], steps=2000, seeds=3)
    print(result)

The same model, data and seed are trained in BF16 and in each other precision. docs/parity.md describes the comparison.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

import deepwell
from deepwell import _deepwell
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.kernels.profiler import device_name
from deepwell.precision import NAMES, Precision, PrecisionPolicy
from deepwell.training import data as sources

REFERENCE = "bf16"
# Largest accepted gap of the held-out loss, as a fraction of the BF16 loss. 8 bits: DeepSeek-V3's technical report,
# arXiv 2412.19437, section 3.3, FP8 against BF16. 4 bits: NVIDIA, arXiv 2509.25149, NVFP4 at the end of a run, there
# against FP8.
BAR_8_BITS, BAR_4_BITS = 0.0025, 0.015
HELD_OUT_SHARE, HELD_OUT_BATCHES = 0.05, 100
RUNS, REPORT, PAGE, PICTURE = "runs.jsonl", "parity.json", "parity.html", "parity.png"
_FORMAT = {"format": "deepwell.parity", "version": 1}
_WITHIN, _APART, _DIVERGED, _UNSUPPORTED = "within", "apart", "diverged", "unsupported"


# ---- what is compared ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A precision of the comparison. ``policy`` is None for BF16: BF16 weights and no policy."""

    name: str
    policy: PrecisionPolicy | None
    bar: float


def variants_of(precisions: Any, bar: float | None = None) -> list[Variant]:
    """Returns the reference and then the precisions: names, files of policies, ``Precision``, ``PrecisionPolicy``, or a
    mapping from names to these."""
    if isinstance(precisions, (str, os.PathLike, PrecisionPolicy)):
        precisions = [precisions]
    named = isinstance(precisions, Mapping)
    entries = precisions.items() if named else ((None, each) for each in precisions)
    found = [Variant(REFERENCE, None, 0.0)]
    for name, given in entries:
        variant = _variant(name, given, bar)
        if variant.name == REFERENCE and name is None:
            continue  # always there
        if variant.name in (each.name for each in found):
            raise ValueError(
                f"two precisions are called '{variant.name}': rename a file, or give a mapping with a name for each"
            )
        found.append(variant)
    if len(found) == 1:
        raise ValueError(
            f"there is no precision to compare with BF16: give one of {', '.join(_names())}, or a policy's file"
        )
    return found


def _names() -> list[str]:
    return [name for name in NAMES if name not in ("fp32", REFERENCE)]


def _variant(name: str | None, given: Any, bar: float | None) -> Variant:
    if isinstance(given, PrecisionPolicy):
        policy, made = given, given.name
    elif isinstance(given, os.PathLike) or (
        isinstance(given, str) and (given.endswith(".json") or os.sep in given)
    ):
        policy, made = PrecisionPolicy.load(given), Path(given).stem
    elif str(getattr(given, "value", given)) == REFERENCE:
        # Under a name of its own it shows whether runs repeat.
        return Variant(name or REFERENCE, None, BAR_8_BITS if bar is None else bar)
    else:
        made = str(given.value if isinstance(given, Precision) else given)
        if made not in _names():
            raise ValueError(
                f"there is no precision '{made}' to compare with BF16: use one of {', '.join(_names())}, or the file of a "
                "policy in .json"
            )
        policy = PrecisionPolicy(made)
    # "safe" would train a part of the model in BF16, and compare BF16 with itself.
    policy = PrecisionPolicy.from_json(
        json.dumps({**json.loads(policy.to_json()), "fallback": "strict"})
    )
    if bar is None:
        operands = [scheme for layer in policy._policy.operands() for scheme in layer]
        four_bits = any("fp4" in scheme for scheme in operands)
        bar = BAR_4_BITS if four_bits else BAR_8_BITS
    return Variant(made if name is None else name, policy, bar)


# ---- runs ----------------------------------------------------------------------------------------


@dataclass
class Run:
    """A finished training run. Losses are means of a step before its update, None if not finite; ``held_out`` has
    (step, loss)."""

    precision: str
    policy: str  # JSON; "" for the reference
    seed: int
    losses: list[float | None]
    held_out: list[list[float]]
    diverged: str = ""  # why, if it did
    step_ms: float | None = None  # the median of the steps after the first ones
    seconds: float = 0.0

    @property
    def loss(self) -> float:
        """The held-out loss at the end; infinite if the run diverged."""
        return self.held_out[-1][1] if self.held_out and not self.diverged else math.inf

    @property
    def training_loss(self) -> float:
        """The mean over the last twentieth of the steps."""
        last = self.losses[-max(1, len(self.losses) // 20) :]
        finite = [loss for loss in last if loss is not None]
        return math.inf if self.diverged or not finite else statistics.fmean(finite)


class _Watch:
    """Keeps what a run reports, and shows it on a terminal."""

    def __init__(self, title: str, steps: int, show: bool) -> None:
        self.title, self.steps, self.show = title, steps, show
        self.losses: list[float] = []
        self.held_out: list[list[float]] = []
        self.seconds: list[float] = []
        self.drawn = 0.0

    def on_step(self, trainer: Any, report: Any) -> None:
        self.losses.append(report.loss)
        self.seconds.append(report.seconds)
        now = time.monotonic()
        if self.show and (now - self.drawn > 0.2 or report.step == self.steps):
            self.drawn = now
            left = (self.steps - report.step) * statistics.median(self.seconds[-50:])
            line = f"{self.title}  step {report.step}/{self.steps}  loss {report.loss:.4f}  left {left:.0f} s"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    def on_evaluate(self, trainer: Any, step: int, loss: float) -> None:
        self.held_out.append([step, loss])


class _Ledger:
    """The finished runs of a folder: a line of JSON with the setup, then one for each run."""

    def __init__(self, folder: str | os.PathLike | None, setup: Mapping[str, Any], fresh: bool):
        self.runs: list[Run] = []
        self.path = None if folder is None else Path(folder) / RUNS
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if fresh or not self.path.exists() or not self.path.stat().st_size:
            self._write(setup)
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        try:
            head = json.loads(lines[0])
            kept = head["setup"] if head.get("format") == _FORMAT["format"] else None
        except (ValueError, KeyError, TypeError, AttributeError):
            kept = None
        if kept is None:
            raise DeepwellError(
                f"{self.path} is not a record of `deepwell parity`: name another folder, or start anew with fresh (--fresh)"
            )
        before, now = dict(_flat(kept)), dict(_flat(setup))
        differences = [
            f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
            for key in {**before, **now}
            if before.get(key) != now.get(key)
        ]
        if differences:
            raise DeepwellError(
                f"{self.path} has runs of another comparison: {'; '.join(differences)}. Name another folder, or start anew "
                "with fresh (--fresh)"
            )
        for number, line in enumerate(lines[1:], 2):
            try:
                self.runs.append(Run(**json.loads(line)))
            except (ValueError, TypeError):
                if number == len(lines):  # the process ended while it wrote
                    break
                raise DeepwellError(f"{self.path}, line {number}: not a run") from None
        if len(self.runs) < len(lines) - 1 or not lines[-1].endswith("\n"):
            self._write(setup)

    def _write(self, setup: Mapping[str, Any]) -> None:
        lines = [{**_FORMAT, "setup": dict(setup)}, *(asdict(run) for run in self.runs)]
        temporary = self.path.with_name(f"{RUNS}.{os.getpid()}")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        temporary.replace(self.path)

    def find(self, variant: Variant, seed: int) -> Run | None:
        policy = _text(variant.policy)
        for run in self.runs:
            if (run.precision, run.policy, run.seed) == (variant.name, policy, seed):
                return run
        return None

    def add(self, run: Run) -> None:
        self.runs.append(run)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(run)) + "\n")
                file.flush()
                os.fsync(file.fileno())


def _flat(fields: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dicts with their names: ("settings.lr", 3e-4)."""
    if not isinstance(fields, dict):
        yield name, fields
        return
    for key, value in fields.items():
        yield from _flat(value, f"{name}.{key}" if name else key)


def _text(policy: PrecisionPolicy | None) -> str:
    return "" if policy is None else json.dumps(json.loads(policy.to_json()), sort_keys=True)


def _translated(error: Exception) -> DeepwellError:
    unsupported = getattr(error, "status", "") == "UNSUPPORTED"
    return (UnsupportedError if unsupported else DeepwellError)(str(error))


# ---- data ----------------------------------------------------------------------------------------


class Sequences(Dataset):
    """The sequences of token files, in their order: dicts of input_ids and labels, which are moved by one token."""

    def __init__(
        self, paths: Any, sequence: int, vocabulary: int, token_type: str | None = None
    ) -> None:
        options = {
            "shuffle": 0,
            "seed": 0,
            "sequence": sequence,
            "batch": 1,
            "micro_batch": 0,
            "token_type": {None: 0, "uint16": 1, "uint32": 2}[token_type],
            "data": sources.paths(paths),
            "steps": 1,
        }
        try:
            self.files = _deepwell.tokens_open(options, vocabulary)
        except _deepwell.Error as error:
            raise _translated(error) from None
        self.width = sequence + 1
        self.tokens, self.count = _deepwell.tokens_size(self.files)
        described = json.loads(_deepwell.training_describe(options, self.files))
        self.identity = described.get("data")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.empty(1, self.width, dtype=torch.int64)
        _deepwell.tokens_read(self.files, index, 1, self.width, row.data_ptr())
        labels = row[0, 1:].contiguous()
        return {"input_ids": row[0, :-1].contiguous(), "labels": labels, "shift_labels": labels}


# ---- models --------------------------------------------------------------------------------------


@dataclass
class _Source:
    """Where the models come from: ``make(seed)`` returns a new one in FP32 or in the types that it has."""

    make: Callable[[int], torch.nn.Module]
    identity: dict[str, Any]
    config: Any = None  # transformers' configuration, if there is one


def _fields(config: Any) -> dict[str, Any] | None:
    """Returns a configuration's fields as JSON has them, without those that do not change the model."""
    if not hasattr(config, "to_dict"):
        return None
    fields = json.loads(json.dumps(config.to_dict(), default=str))
    return {
        key: value
        for key, value in fields.items()
        if key not in ("_name_or_path", "transformers_version")
    }


def _without_dropout(config: Any) -> None:
    for key in list(config.to_dict()):
        if key.endswith("pdrop") or key.endswith("dropout"):
            setattr(config, key, 0.0)


def _model_source(model: Any, init: bool, no_dropout: bool) -> _Source:
    if isinstance(model, torch.nn.Module):
        kind = type(model)
        made = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            made.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            made.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        identity = {"class": f"{kind.__module__}.{kind.__qualname__}", "weights": made.hexdigest()}
        return _Source(lambda seed: copy.deepcopy(model), identity, getattr(model, "config", None))
    if callable(model):
        name = f"{getattr(model, '__module__', '')}.{getattr(model, '__qualname__', type(model).__name__)}"

        def made_by_caller(seed: int) -> torch.nn.Module:
            torch.manual_seed(seed)
            return model()

        with torch.random.fork_rng(devices=[]):
            config = getattr(made_by_caller(0), "config", None)
        return _Source(made_by_caller, {"function": name, "config": _fields(config)}, config)
    return _named_source(os.fspath(model), init, no_dropout)


def _named_source(model: str, init: bool, no_dropout: bool) -> _Source:
    try:
        import transformers
    except ImportError:
        raise UnsupportedError(
            "models by name or folder need the package transformers: pip install transformers"
        ) from None
    folder = Path(model)
    random = init or not folder.exists()
    try:
        text = _deepwell.model_config(model) if not folder.exists() else ""
    except _deepwell.Error as error:
        raise _translated(error) from None
    try:
        if text:
            fields = json.loads(text)
            config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        else:
            config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DeepwellError(f"the model {model} cannot be read: {error}") from None
    config.use_cache = False
    if no_dropout:
        _without_dropout(config)
    auto = transformers.AutoModelForCausalLM
    identity = {"config": _fields(config), "init": random}
    if not random:
        made = hashlib.sha256()
        files = sorted(folder.glob("*.safetensors"))
        for file in files:
            with open(file, "rb") as opened:
                while piece := opened.read(1 << 24):
                    made.update(piece)
        identity["weights"] = made.hexdigest()

    def make(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        if random:
            return auto.from_config(copy.deepcopy(config))
        try:
            return auto.from_pretrained(
                model, config=copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise DeepwellError(
                f"the weights in {model} cannot be read: {error}; --init draws random ones"
            ) from None

    return _Source(make, identity, config)


# ---- the comparison ------------------------------------------------------------------------------


@dataclass
class Settings:
    """Options of the training that every run has."""

    steps: int
    batch: int = 8
    accumulate: int = 1
    sequence: int = 256
    lr: float = 3e-4
    warmup_steps: int | None = None  # None: a twentieth of the steps
    schedule: str = "cosine"
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_every: int | None = None  # None: a tenth of the steps

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch", 1), ("accumulate", 1), ("sequence", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}: expected a number of at least {least}")
        if self.batch % self.accumulate:
            raise ValueError(
                f"batch is {self.batch} and accumulate {self.accumulate}, which does not divide it"
            )
        if self.warmup_steps is None:
            self.warmup_steps = self.steps // 20
        if self.eval_every is None:
            self.eval_every = max(1, self.steps // 10)


class Comparison:
    """The runs of one comparison. ``run`` makes one of them, ``result`` compares those that are done."""

    def __init__(
        self,
        model: Any,
        data: Any,
        variants: Sequence[Variant],
        settings: Settings,
        *,
        held_out: Any = None,
        output: str | os.PathLike | None = None,
        fresh: bool = False,
        device: str | torch.device | None = None,
        init: bool = False,
        no_dropout: bool = False,
        loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None,
        token_type: str | None = None,
        show: bool = False,
    ) -> None:
        self.variants, self.settings = list(variants), settings
        self.loss_fn, self.show = loss_fn, show
        self.source = _model_source(model, init, no_dropout)
        self.device = _device(device, model)
        identity = self._open_data(data, held_out, token_type)
        self.setup = {
            "model": self.source.identity,
            "data": identity,
            "settings": asdict(settings),
            "device": device_name(self.device),
            "deepwell": deepwell.__version__,
            "pytorch": torch.__version__,
        }
        self.setup = json.loads(json.dumps(self.setup))
        self.ledger = _Ledger(output, self.setup, fresh)
        self.unsupported: dict[str, str] = {}

    def _open_data(self, data: Any, held_out: Any, token_type: str | None) -> dict[str, Any]:
        rows = self.settings.batch // self.settings.accumulate
        if not sources.is_paths(data):
            if held_out is None:
                raise ValueError(
                    "held_out is missing: data that are not token files cannot be divided; give a dataset or batches"
                )
            self.data, self.held_out = data, held_out
            return {"class": type(data).__name__, "length": sources._length(data)}
        self._check_positions()
        sequence, vocabulary = self.settings.sequence, self._vocabulary()
        every = Sequences(data, sequence, vocabulary, token_type)
        if held_out is not None:
            self.data = every
            self.held_out = (
                Sequences(held_out, sequence, vocabulary, token_type)
                if sources.is_paths(held_out)
                else held_out
            )
        else:
            batches = min(int(len(every) * HELD_OUT_SHARE) // rows, HELD_OUT_BATCHES)
            kept = max(batches, 1) * rows
            self.data = Subset(every, range(max(0, len(every) - kept)))
            self.held_out = Subset(every, range(len(self.data), len(every)))
        if len(self.data) < rows or len(self.held_out) < rows:
            raise DeepwellError(
                f"the data have {len(every)} sequences of {sequence} tokens, {len(self.held_out)} of them held out: a batch "
                f"needs {rows} of both. Give more data, or a smaller batch or sequence"
            )
        identity = {"files": every.identity, "sequences": [len(self.data), len(self.held_out)]}
        if isinstance(self.held_out, Sequences):
            identity["held_out"] = self.held_out.identity
        return identity

    def _check_positions(self) -> None:
        positions = getattr(self.source.config, "n_positions", None)
        if isinstance(positions, int) and self.settings.sequence > positions:
            raise ValueError(
                f"sequence is {self.settings.sequence}: the model has {positions} positions"
            )

    def _vocabulary(self) -> int:
        config = self.source.config
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        size = getattr(config, "vocab_size", None)
        if not isinstance(size, int):
            raise ValueError(
                "token files need the size of the vocabulary, and the model has no config.vocab_size: give a dataset and "
                "held_out"
            )
        return size

    def run(self, variant: Variant, seed: int) -> Run | None:
        """Returns the run, from the folder if it is there. None: the precision is not supported here, and
        ``unsupported`` says why."""
        found = self.ledger.find(variant, seed)
        if found is not None:
            return found
        try:
            made = self._train(variant, seed)
        except UnsupportedError as error:
            if variant.policy is None:
                raise
            self.unsupported[variant.name] = str(error)
            return None
        self.ledger.add(made)
        return made

    def _train(self, variant: Variant, seed: int) -> Run:
        settings = self.settings
        began = time.perf_counter()
        watch = _Watch(f"{variant.name}, seed {seed}:", settings.steps, self.show)
        model = in_bf16(self.source.make(seed)).to(self.device)
        torch.manual_seed(seed)
        diverged = ""
        with _engine_alone():
            deepwell.optimize(
                model,
                precision="auto" if variant.policy is None else variant.policy,
                verbose=False,
            )
            trainer = deepwell.Trainer(
                model,
                self.data,
                optimizer=lambda groups: deepwell.AdamW(
                    groups,
                    lr=settings.lr,
                    betas=(0.9, 0.95),
                    master_weights=True,
                    state_dtype=torch.float32,
                ),
                optimize=False,
                loss_fn=self.loss_fn,
                steps=settings.steps,
                batch=settings.batch // settings.accumulate,
                accumulate=settings.accumulate,
                warmup_steps=settings.warmup_steps,
                schedule=settings.schedule,
                min_lr_ratio=settings.min_lr_ratio,
                weight_decay=settings.weight_decay,
                clip=settings.clip,
                seed=seed,
                eval_dataloader=self.held_out,
                eval_every=settings.eval_every,
                callbacks=[watch],
                progress=False,
                max_rollbacks=0,
            )
            try:
                trainer.fit()
            except deepwell.DivergenceError as error:
                diverged = str(error)
            finally:
                if self.show:
                    print("\r\033[K", end="", file=sys.stderr, flush=True)
        if not diverged and not math.isfinite(trainer.validation_loss):
            diverged = f"the held-out loss is {trainer.validation_loss}"
        times = watch.seconds[min(5, len(watch.seconds) // 2) :]
        deepwell.restore(model)
        del model, trainer
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return Run(
            precision=variant.name,
            policy=_text(variant.policy),
            seed=seed,
            losses=_plain(watch.losses),
            held_out=[each for each in watch.held_out if math.isfinite(each[1])],
            diverged=diverged,
            step_ms=statistics.median(times) * 1e3 if times else None,
            seconds=time.perf_counter() - began,
        )

    def result(self) -> ParityResult:
        """Compares the runs that are done. Raises DeepwellError without a run in BF16."""
        runs = [
            run
            for variant in self.variants
            for run in self.ledger.runs
            if (run.precision, run.policy) == (variant.name, _text(variant.policy))
        ]
        return ParityResult(self.setup, self.variants, runs, dict(self.unsupported))


def in_bf16(model: torch.nn.Module) -> torch.nn.Module:
    """Makes parameters BF16. Buffers keep their types: tables of rotary positions need FP32."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _plain(losses: Sequence[float]) -> list[float | None]:
    """JSON has no infinities."""
    return [loss if math.isfinite(loss) else None for loss in losses]


@contextmanager
def _engine_alone() -> Iterator[None]:
    """Without this a comparison of times could leave BF16 to PyTorch, in one run and not in the next."""
    before = os.environ.get("DEEPWELL_MEASURE")
    os.environ["DEEPWELL_MEASURE"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DEEPWELL_MEASURE"]
        else:
            os.environ["DEEPWELL_MEASURE"] = before


def _device(device: str | torch.device | None, model: Any) -> torch.device:
    if device in (None, "auto"):
        if isinstance(model, torch.nn.Module):
            return next(model.parameters()).device
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "device cuda is not supported here: PyTorch finds no GPU (`deepwell doctor` says why)"
            )
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    return device


# ---- the result ----------------------------------------------------------------------------------


@dataclass
class Row:
    """A precision against BF16. Gaps are fractions of the BF16 loss of the same seed, means over seeds."""

    precision: str
    verdict: str  # within, apart, diverged, unsupported, or "" for BF16 and what has not run
    bar: float
    seeds: list[int] = field(default_factory=list)
    loss: float | None = None  # held-out, at the end
    perplexity: float | None = None
    gap: float | None = None  # of the held-out loss
    training_gap: float | None = None  # of the training loss over the last twentieth of the steps
    step_ms: float | None = None
    why: str = ""  # of diverged and unsupported


class ParityResult:
    """What ``deepwell.parity`` returns. ``print(result)`` shows it as a table.

    Attributes:
        rows: a ``Row`` for BF16 and one for each precision.
        noise: the standard deviation of the BF16 held-out loss over seeds, as a fraction of its mean; None for one seed.
        runs: all runs, with their losses.
        verdict: "within", "apart" or "unsupported".
        exit_status: 0, 1 or 3: that of `deepwell parity`.
    """

    def __init__(
        self,
        setup: Mapping[str, Any],
        variants: Sequence[Variant],
        runs: Sequence[Run],
        unsupported: Mapping[str, str],
    ) -> None:
        self.setup, self.variants, self.runs = dict(setup), list(variants), list(runs)
        reference = {run.seed: run for run in self.of(REFERENCE)}
        for run in reference.values():
            _check_reference(run)
        if not reference:
            raise DeepwellError("there is no BF16 run to compare with")
        losses = [run.loss for run in reference.values()]
        self.noise: float | None = None
        if len(losses) > 1:
            self.noise = statistics.stdev(losses) / statistics.fmean(losses)
        self.rows = [self._row(variant, reference, unsupported) for variant in self.variants]
        verdicts = {row.verdict for row in self.rows}
        if verdicts & {_APART, _DIVERGED}:
            self.verdict, self.exit_status = _APART, 1
        elif _UNSUPPORTED in verdicts:
            self.verdict, self.exit_status = _UNSUPPORTED, 3
        else:
            self.verdict, self.exit_status = _WITHIN, 0

    def of(self, precision: str) -> list[Run]:
        """Returns the runs of a precision, by seed."""
        return sorted((r for r in self.runs if r.precision == precision), key=lambda r: r.seed)

    def _row(
        self, variant: Variant, reference: Mapping[int, Run], unsupported: Mapping[str, str]
    ) -> Row:
        row = Row(variant.name, "", variant.bar)
        runs = [run for run in self.of(variant.name) if run.seed in reference]
        if not runs:
            if variant.name in unsupported:
                row.verdict, row.why = _UNSUPPORTED, unsupported[variant.name]
            return row
        row.seeds = [run.seed for run in runs]
        row.step_ms = runs[0].step_ms
        diverged = [run for run in runs if run.diverged]
        if diverged:
            row.verdict, row.why = _DIVERGED, diverged[0].diverged
            return row
        row.loss = statistics.fmean(run.loss for run in runs)
        row.perplexity = _perplexity(row.loss)
        if variant.name != REFERENCE:
            row.gap = statistics.fmean(run.loss / reference[run.seed].loss - 1 for run in runs)
            row.training_gap = statistics.fmean(
                run.training_loss / reference[run.seed].training_loss - 1 for run in runs
            )
            row.verdict = _WITHIN if abs(row.gap) <= row.bar else _APART
        return row

    def to_json(self) -> str:
        """Returns the result as JSON: verdict, rows, noise, setup and runs (docs/parity.md)."""
        return json.dumps(
            {
                **_FORMAT,
                "verdict": self.verdict,
                "noise": self.noise,
                "precisions": [asdict(row) for row in self.rows],
                "setup": self.setup,
                "runs": [asdict(run) for run in self.runs],
            },
            indent=1,
        )

    def html(self, path: str | os.PathLike | None = None) -> str:
        """Returns a page with the table and the curves, and writes it to ``path`` if that is given."""
        from deepwell import parity_page

        page = parity_page.page(self)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def png(self, path: str | os.PathLike) -> None:
        """Draws the curves. Raises UnsupportedError if the package matplotlib is missing."""
        from deepwell import parity_page

        parity_page.picture(self, path)

    def __str__(self) -> str:
        rows = [
            ["precision", "seeds", "loss", "perplexity", "gap", "training", "bar", "ms/step", ""]
        ]
        for row in self.rows:
            rows.append(
                [
                    row.precision,
                    str(len(row.seeds)) if row.seeds else "-",
                    _shown(row.loss, ".4f"),
                    _shown(row.perplexity, ".2f"),
                    _shown(row.gap, "+.2%"),
                    _shown(row.training_gap, "+.2%"),
                    f"{row.bar:.2%}" if row.bar else "-",
                    _shown(row.step_ms, ".1f"),
                    self.told(row),
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = []
        for cells in rows:
            first, *others, last = cells
            middle = "  ".join(cell.rjust(width) for cell, width in zip(others, widths[1:]))
            lines.append(f"{first.ljust(widths[0])}  {middle}  {last}".rstrip())
        lines += ["", self.noise_told()]
        lines += [f"{row.precision}: {row.why}" for row in self.rows if row.why]
        return "\n".join(lines)

    def told(self, row: Row) -> str:
        """Returns the verdict of a row, and whether the noise alone could explain it."""
        if row.verdict == _APART and self.noise is not None and abs(row.gap) <= 2 * self.noise:
            return "apart, by less than two deviations of the noise"
        return row.verdict

    def noise_told(self) -> str:
        """Describes the noise over seeds in a sentence or two."""
        if self.noise is None:
            return "Noise over seeds: not known, since BF16 has one seed."
        count = len(self.of(REFERENCE))
        text = f"Noise over seeds: {self.noise:.2%}, the standard deviation of the BF16 loss over {count} seeds."
        bars = [row.bar for row in self.rows if row.bar]
        if bars and self.noise > min(bars):
            text += f" It is above a bar of {min(bars):.2%}: more steps, data or held-out text give a sharper comparison."
        return text


def _check_reference(run: Run) -> None:
    if run.diverged:
        raise DeepwellError(
            f"the BF16 run of seed {run.seed} diverged, so that there is nothing to compare with: {run.diverged}"
        )


def _perplexity(loss: float) -> float | None:
    return math.exp(loss) if loss < 700 else None


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def parity(
    model: Any,
    data: Any,
    precisions: Any,
    steps: int,
    seeds: int = 1,
    *,
    held_out: Any = None,
    output: str | os.PathLike | None = None,
    fresh: bool = False,
    device: str | torch.device | None = None,
    init: bool = False,
    no_dropout: bool = False,
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None,
    token_type: str | None = None,
    bar: float | None = None,
    progress: bool = True,
    **settings: Any,
) -> ParityResult:
    """Trains the model in BF16 and in each of the precisions, and compares the losses. See docs/parity.md.

    Args:
        model: the name of a published model (random weights), a Hugging Face folder, a module, whose weights every run
            starts from, or a function that makes a module, called after ``torch.manual_seed(seed)``.
        data: paths of token files, or a dataset or batches as ``deepwell.Trainer`` takes them, with ``held_out``.
        precisions: names, files of policies, ``Precision`` or ``PrecisionPolicy``; or a mapping from names to these.
        steps: of each run.
        seeds: BF16 runs with the seeds 0 to ``seeds`` - 1, which give the noise; the others run with seed 0.
        held_out: data for the held-out loss. None: the last 5% of the token files.
        output: folder for runs, report, page and picture. Runs that are there are not made again. None: keeps nothing.
        fresh: makes the runs of the folder again.
        device: "cpu", "cuda", or None: where the module is, else the GPU if there is one.
        init: draws random weights for a folder's model.
        no_dropout: sets the dropout of a named model or folder to 0.
        loss_fn: as for ``deepwell.Trainer``.
        bar: the largest accepted gap, as a fraction, in place of those of docs/parity.md.
        progress: shows a line on a terminal.
        settings: batch, accumulate, sequence, lr, warmup_steps, schedule, min_lr_ratio, weight_decay, clip, eval_every.

    Raises:
        ValueError: an argument that does not exist or does not fit.
        UnsupportedError: BF16 is not supported here. A precision that is not makes ``verdict`` "unsupported".
        DeepwellError: the data or the model cannot be read, or the run in BF16 diverged.
    """
    if not isinstance(seeds, int) or seeds < 1:
        raise ValueError(f"seeds is {seeds!r}: expected a number of at least 1")
    comparison = Comparison(
        model,
        data,
        variants_of(precisions, bar),
        Settings(steps, **settings),
        held_out=held_out,
        output=output,
        fresh=fresh,
        device=device,
        init=init,
        no_dropout=no_dropout,
        loss_fn=loss_fn,
        token_type=token_type,
        show=progress and sys.stderr.isatty(),
    )
    reference, *others = comparison.variants
    # The first seed of each precision comes before the other seeds of BF16: an interrupted comparison can be read.
    first = comparison.run(reference, 0)
    _check_reference(first)
    for variant in others:
        comparison.run(variant, 0)
    for seed in range(1, seeds):
        comparison.run(reference, seed)
    result = comparison.result()
    if output is not None:
        write_reports(result, output)
    return result


def write_reports(result: ParityResult, folder: str | os.PathLike) -> str:
    """Writes the report, the page and the picture. Returns why there is no picture, or ""."""
    place = Path(folder)
    (place / REPORT).write_text(result.to_json() + "\n", encoding="utf-8")
    result.html(place / PAGE)
    try:
        result.png(place / PICTURE)
    except UnsupportedError as error:
        return str(error)
    return ""
