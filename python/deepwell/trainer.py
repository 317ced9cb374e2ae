"""``deepwell.Trainer``: the loop around an optimized model, with checkpoints that `deepwell train` reads and writes.

The steps run in the engine, the updates in ``deepwell.AdamW``. Learning rates, the norm of gradients, token files and
their order, checkpoint folders and manifests are those of `deepwell train`, in C (include/deepwell/training.h and
checkpoints.h). docs/trainer.md describes the options and the files.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Iterator

import torch
import torch.distributed as dist

from deepwell import _deepwell, optim, routing
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.expert_load import ExpertLoad, ExpertLoads
from deepwell.kept import accumulate as same_weights
from deepwell.moe import DeepwellMoE
from deepwell.muon import Muon
from deepwell.optimize import (
    change_policy,
    has_own_target,
    installed,
    is_optimized_in_parts,
    sessions,
)
from deepwell.optimize import optimize as optimize_model
from deepwell.precision_guard import (
    OperandReport,
    Sample,
    Watch,
    over_ranks,
    reports,
    sample_precision,
    told,
)
from deepwell.training import data as sources
from deepwell.training import progress as printing
from deepwell.training import random_state, state
from deepwell.training.writer import TRAINER, Checkpoints, Snapshot, texts_of, write_alone

_LEAST_LOSSES = 8  # a limit for spikes needs so many, or the whole window
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class _Queued:
    """A step that the GPU has not finished."""

    step: int
    lr: float
    tokens: int
    # float64 in pinned memory: the loss, the outcome of the update, and the statistics of a sampled step
    numbers: torch.Tensor
    copied: Any  # the event after the copy of the numbers; None where nothing is asynchronous
    spike_limit: float | None
    layers: list[dict[str, Any]]  # of the statistics
    loads: int  # how many of the numbers, the last ones, are loads of experts


class DivergenceError(DeepwellError):
    """Losses or gradients of several steps in a row were not finite, or the losses were spikes."""


@dataclass
class StepReport:
    """What a step was. ``loss`` is the mean before the update, ``gradient_norm`` the norm before clipping."""

    step: int  # from 1
    loss: float
    gradient_norm: float
    lr: float
    seconds: float
    applied: bool  # False: the loss or a gradient was not finite, or the loss a spike; nothing was changed
    not_finite: str = ""  # if not applied: "the loss", or a parameter's name; "" for a spike
    tokens: int = 0  # elements of input_ids in the step, of all ranks; 0: not known
    spike_limit: float | None = None  # losses above it are spikes; None: the step was not judged
    operands: list[OperandReport] | None = None  # the rounding of each operand, in a sampled step
    experts: list[ExpertLoad] | None = None  # the load of each mixture of experts

    @property
    def is_spike(self) -> bool:
        return not self.applied and not self.not_finite


@dataclass
class FitResult:
    steps: int  # done, in the whole run
    loss: float | None  # of the last step
    validation_loss: float | None  # the last one
    checkpoint: str | None  # the newest


class Callback:
    """What a callback may define. Any object with some of these methods will do.

    A callback that has ``state_dict`` and ``load_state_dict`` is saved in checkpoints, as JSON, by its position in the
    list of callbacks.
    """

    def on_start(self, trainer: Trainer) -> None:
        """The run begins or resumes; ``trainer.step`` steps are done."""

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """A step is done. ``trainer.stop()`` ends the run after it."""

    def on_evaluate(self, trainer: Trainer, step: int, loss: float) -> None:
        """The validation loss after ``step`` steps."""

    def on_checkpoint(self, trainer: Trainer, step: int, path: str) -> None:
        """The checkpoint of ``step`` is complete in the folder ``path``."""

    def on_precision(self, trainer: Trainer, change: dict[str, Any]) -> None:
        """A layer falls back to BF16, or the repair begins; ``trainer.precision_changes`` has all changes."""

    def on_rollback(self, trainer: Trainer, step: int) -> None:
        """Training diverged; weights and optimizer are those of the checkpoint of ``step`` again."""

    def on_end(self, trainer: Trainer) -> None:
        """The run ends, for whatever reason."""


class Trainer:
    """Trains a model. See docs/trainer.md.

    Args:
        model: any nn.Module; Deepwell optimizes it (``optimize=False``: it stays as it is). It may be in
            DistributedDataParallel, or sharded by fully_shard. A model that is optimized for a target stays so.
        dataloader: a DataLoader, a dataset, an iterable of batches, or paths of token files.
        optimizer: "adamw_dw", "adamw", "muon", an optimizer, or a function from the groups of parameters to an
            optimizer.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss. Default: ``model(**batch).loss``, plus the auxiliary
            losses of ``DeepwellMoE`` layers.
        steps, epochs: length of the run; without both, one epoch.
        lr, warmup_steps, schedule, schedule_steps, min_lr_ratio: the learning rate, as in docs/train.md. With an
            optimizer object each group keeps its own peak.
        accumulate: batches per step; their gradients are averaged.
        clip: most norm of the gradients; 0: no clipping.
        sequence, batch, shuffle, token_type, vocabulary: of token files; ``batch`` and ``shuffle`` of datasets too.
        seed: of the order of token files and datasets.
        autocast: dtype under which the forward runs.
        eval_dataloader, eval_every, eval_batches: validation, after the last step and every ``eval_every``.
        checkpoint, save_every, save_minutes, keep, resume: folder of checkpoints. ``resume=True`` continues from the
            newest one, or starts; a path continues from that checkpoint.
        max_bad_steps, max_rollbacks: after that many steps in a row that are not finite, or spikes, the run goes back to
            its newest checkpoint, at most ``max_rollbacks`` times to the same one, and then fails.
        spike_factor, spike_window: a step whose loss is above ``spike_factor`` times the mean loss of the last
            ``spike_window`` applied steps is a spike, and is not applied. None: no loss is too large.
        precision: as for ``deepwell.optimize``; None keeps that of an optimized model. The guard of a
            ``PrecisionPolicy`` is obeyed.
        quantize_once: with ``accumulate`` and a precision, weights are quantized once in each step, and their codes are
            kept until its end. False: again for each batch, which takes less memory. Results are the same.
        elastic: a resumed run may have another number of ranks.
        callbacks, progress, report_every, log, tensorboard: what is reported, see docs/trainer.md.
        tokenizer: saved with each checkpoint.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dataloader: Any = None,
        *,
        optimizer: Any = "adamw_dw",
        loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None,
        optimize: bool = True,
        steps: int | None = None,
        epochs: int | None = None,
        lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        decay_all: bool = False,
        warmup_steps: int = 0,
        schedule: str = "cosine",
        schedule_steps: int | None = None,
        min_lr_ratio: float = 0.1,
        accumulate: int = 1,
        clip: float = 1.0,
        sequence: int = 256,
        batch: int = 8,
        shuffle: bool = True,
        token_type: str | None = None,
        vocabulary: int | None = None,
        seed: int = 0,
        autocast: torch.dtype | None = None,
        eval_dataloader: Any = None,
        eval_every: int | None = None,
        eval_batches: int | None = None,
        checkpoint: str | os.PathLike | None = None,
        save_every: int | None = None,
        save_minutes: float | None = None,
        keep: int = 2,
        resume: bool | str | os.PathLike = False,
        max_bad_steps: int = 5,
        max_rollbacks: int = 3,
        spike_factor: float | None = None,
        spike_window: int = 32,
        elastic: bool = False,
        callbacks: Sequence[Any] = (),
        progress: bool = True,
        report_every: int = 10,
        log: str | os.PathLike | None = None,
        tensorboard: str | os.PathLike | None = None,
        tokenizer: Any = None,
        plan: Any = None,
        precision: Any = None,
        quantize_once: bool = True,
    ) -> None:
        if dataloader is None:
            raise ValueError(
                "Trainer: dataloader is missing; give a DataLoader, a dataset, an iterable of batches, or paths of "
                "token files"
            )
        for name, value, least in (
            ("accumulate", accumulate, 1),
            ("keep", keep, 1),
            ("max_bad_steps", max_bad_steps, 1),
            ("max_rollbacks", max_rollbacks, 0),
            ("spike_window", spike_window, 1),
        ):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; use a number of at least {least}")
        if spike_factor is not None and not spike_factor > 1.0:
            raise ValueError(
                f"spike_factor is {spike_factor!r}; use a number above 1, such as 1.5, or None for no limit"
            )
        if token_type not in (None, "uint16", "uint32"):
            raise ValueError(f'token_type is {token_type!r}; use "uint16" or "uint32"')
        if resume is True and checkpoint is None:
            raise ValueError(
                "resume=True needs checkpoint=FOLDER; or name the checkpoint: resume=PATH"
            )
        state.check_sharding(model)
        self.rank, self.ranks = _rank()
        self.model, self.module = model, state.unwrap(model)
        self.device = _device_of(self.module)
        policies = [each.policy for each in sessions(model) if each.policy is not None]
        # The names in a policy are relative to the module that was optimized with it, so that a policy of a part is none of
        # the whole model.
        kept = precision is None and (
            has_own_target(model) or (bool(policies) and is_optimized_in_parts(model))
        )
        if precision is None and policies:
            precision = policies[0]
        if optimize and not kept:
            optimize_model(model, "auto" if precision is None else precision, verbose=False)
        self._loads = self._watched_experts()
        self.loss_fn, self.accumulate, self.clip = loss_fn, accumulate, clip
        self.autocast, self.plan, self.precision = autocast, plan, precision
        self.elastic, self.tokenizer, self.quantize_once = elastic, tokenizer, quantize_once
        self.eval_every, self.eval_batches = eval_every, eval_batches
        self.folder, self.keep, self.resume = checkpoint, keep, resume
        self.save_every, self.save_minutes = save_every, save_minutes
        self.max_bad_steps, self.max_rollbacks = max_bad_steps, max_rollbacks
        self.spike_factor, self.spike_window = spike_factor, spike_window
        self.spikes = 0  # steps that were not applied for this reason, in this process
        self._losses: list[tuple[int, float]] = []  # of the last applied steps
        self._watch = self._make_watch()
        self._policy = None if self._watch is None else self._watch.policy  # of the last step
        self.callbacks = list(callbacks)
        self.show = progress and self.rank == 0
        self.report_every, self.log_path, self.tensorboard_path = report_every, log, tensorboard
        self.schedule_is_given = schedule_steps is not None
        self.step = 0  # done
        self.updates = 0  # applied
        self.last_report: StepReport | None = None
        self.validation_loss: float | None = None

        self.options: dict[str, Any] = {
            "shuffle": int(shuffle),
            "seed": seed,
            "warmup_steps": warmup_steps,
            "lr": 3e-4 if lr is None else lr,
            "min_lr_ratio": min_lr_ratio,
            "beta1": betas[0],
            "beta2": betas[1],
            "eps": eps,
            "weight_decay": weight_decay,
            "decay_all": int(decay_all),
            "clip": clip,
            "schedule": schedule,
            "device": self.device.type,
            "precision": self._precision_name(),
        }
        self._make_optimizer(optimizer, lr)
        self.reads_tokens = sources.is_paths(dataloader)
        if self.reads_tokens:
            self._check_batch(batch)
            self.options.update(
                sequence=sequence,
                batch=batch,
                micro_batch=batch // accumulate,
                token_type={None: 0, "uint16": 1, "uint32": 2}[token_type],
                data=sources.paths(dataloader),
            )
        else:
            self.options.update(sequence=1, batch=accumulate, micro_batch=1)
        self._vocabulary = vocabulary
        self.data = self._source(dataloader, batch, shuffle, training=True)
        self.validation = None
        if eval_dataloader is not None:
            self.validation = self._source(eval_dataloader, batch, False, training=False)
        self.steps = self._step_count(steps, epochs)
        self.options["steps"] = self.steps
        self.options["schedule_steps"] = schedule_steps or self.steps
        self._describe()  # names an option that is not valid

        self._begun = False
        self._checkpoints: Checkpoints | None = None
        self._log: printing.Log | None = None
        self._board: Any = None
        self._printer: printing.Printer | None = None
        self._random: dict[str, Any] | None = None  # to be set before the next batch
        self._bad_in_a_row = 0
        self._queued: _Queued | None = None  # the last step, unless its result is known
        self._finished_at = 0.0
        self._updates_on_gpu = self._can_update_on_gpu()
        self._rollbacks: dict[int, int] = {}
        self._stop_wanted = False  # by this rank
        self._stopping = False  # all ranks know it
        self._signal: int | None = None
        self._saved_at = 0.0
        self._resumed = False

    @classmethod
    def from_engine(
        cls,
        engine: Any,
        optimizer: Any = "adamw_dw",
        dataloader: Any = None,
        elastic: bool = False,
        **options: Any,
    ) -> Trainer:
        """Makes a Trainer of what ``deepwell.compile`` returned, which is optimized already."""
        return cls(
            engine.model,
            dataloader,
            optimizer=optimizer,
            elastic=elastic,
            optimize=False,
            plan=getattr(engine, "plan", None),
            precision=getattr(engine, "precision", None),
            **options,
        )

    # ---- what a run is made of -------------------------------------------------------------------

    def _watched_experts(self) -> ExpertLoads:
        """Returns the mixtures whose load is logged. Routers of transformers record theirs in graphs that are captured
        from now on, so they are left out if there are graphs already."""
        captured = any(forward.programs() for forward in installed(self.model))
        if captured or not installed(self.model):
            return ExpertLoads(routing.mixtures(self.module))
        return ExpertLoads(routing.watch(self.module))

    def _make_watch(self) -> Watch | None:
        """Returns what obeys the guard of the model's policy, or None if it has none."""
        guarded = [each.policy for each in sessions(self.model) if each.policy is not None]
        guarded = [each for each in guarded if each.guard is not None]
        asked = getattr(self.precision, "guard", None)
        if asked is not None and not guarded:
            raise UnsupportedError(
                "precision has a guard, and Deepwell's engine does not run this model: pass optimize=True, or a model "
                "that deepwell.optimize has given this policy"
            )
        if len(guarded) > 1:
            raise UnsupportedError(
                f"{len(guarded)} modules were optimized by themselves with policies that have guards, and Trainer obeys one: "
                "give Trainer the policy of the whole model (precision=), with the names that modules have in it, or leave "
                "out the guards of all but one"
            )
        return Watch(guarded[0]) if guarded else None

    def _precision_name(self) -> str:
        if self.precision not in (None, "auto"):
            policy = _policy(self.precision)
            return policy.lower() if isinstance(policy, str) else json.dumps(policy, sort_keys=True)
        if self.autocast is not None:
            return f"autocast {str(self.autocast).removeprefix('torch.')}"
        dtypes = {each.dtype for each in self.module.parameters() if each.is_floating_point()}
        if dtypes <= {torch.float32}:
            return "fp32"
        return "+".join(sorted(str(each).removeprefix("torch.") for each in dtypes))

    def _check_batch(self, batch: int) -> None:
        if batch < 1 or batch % self.accumulate:
            raise ValueError(
                f"batch is {batch} and accumulate {self.accumulate}, which does not divide it"
            )

    def _groups(self) -> list[dict[str, Any]]:
        """Weight decay applies to matrices alone, as in `deepwell train`."""
        params = [each for each in self.module.parameters() if each.requires_grad]
        every, decay = self.options["decay_all"], self.options["weight_decay"]
        decayed = [each for each in params if every or each.dim() >= 2]
        others = [each for each in params if not (every or each.dim() >= 2)]
        groups = [
            {"params": decayed, "weight_decay": decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def _make_optimizer(self, optimizer: Any, lr: float | None) -> None:
        self._own_rates = not isinstance(optimizer, str)
        if isinstance(optimizer, torch.optim.Optimizer):
            self.optimizer = optimizer
        elif isinstance(optimizer, str):
            factory = _optimizer_class(optimizer)
            settings = {
                "lr": self.options["lr"],
                "betas": (self.options["beta1"], self.options["beta2"]),
                "eps": self.options["eps"],
                "weight_decay": self.options["weight_decay"],
            }
            known = inspect.signature(factory).parameters
            # Muon makes its own groups: matrices between embeddings and head, and all others.
            params = self.model if factory is Muon else self._groups()
            self.optimizer = factory(
                params, **{key: value for key, value in settings.items() if key in known}
            )
        elif callable(optimizer):
            self.optimizer = optimizer(self._groups())
        else:
            raise ValueError(
                f"optimizer is {optimizer!r}; expected a name, a torch.optim.Optimizer, or a function from groups of "
                "parameters to one"
            )
        if self._own_rates and lr is not None:
            raise ValueError("lr is given with an optimizer that has its own; give it there alone")
        peaks = [group.get("initial_lr", group["lr"]) for group in self.optimizer.param_groups]
        self.peaks = [float(each) for each in peaks]
        if self._own_rates:
            self.options["lr"] = 1.0  # the schedule gives each group's share of its peak
            self.options["weight_decay"] = 0.0

    def _can_update_on_gpu(self) -> bool:
        """Whether the GPU itself judges a step, which then needs no wait: deepwell.AdamW on one rank."""
        return (
            self.ranks == 1
            and type(self.optimizer) is optim.AdamW
            and self.optimizer.max_grad_norm is None
            and (self.device.type == "cuda" or optim.emulated is not None)
        )

    def _source(self, data: Any, batch: int, shuffle: bool, training: bool) -> Any:
        if not sources.is_paths(data):
            seed = self.options["seed"]
            return sources.source_of(data, batch, shuffle, seed, self.rank, self.ranks)
        if training:
            options, micro_batches = self.options, self.accumulate
        else:
            # As `deepwell train` validates: micro-batches in the order of the files.
            self._check_batch(batch)
            options = {**self.options, "data": sources.paths(data), "shuffle": 0}
            options.update(batch=batch // self.accumulate, micro_batch=0)
            micro_batches = 1
        return sources.TokenFiles(
            options, self._vocabulary_size(), micro_batches, self.rank, self.ranks
        )

    def _vocabulary_size(self) -> int:
        if self._vocabulary is not None:
            return self._vocabulary
        config = getattr(self.module, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        size = getattr(config, "vocab_size", None)
        if not isinstance(size, int):
            raise ValueError(
                "token files need the size of the vocabulary, and the model has no config.vocab_size; give vocabulary="
            )
        return size

    def _step_count(self, steps: int | None, epochs: int | None) -> int:
        if steps is not None and epochs is not None:
            raise ValueError("give steps or epochs, not both")
        if steps is None:
            if self.data.length is None:
                raise ValueError("the dataloader has no length; give steps=")
            steps = self.data.length * (1 if epochs is None else epochs) // self.accumulate
        if steps < 1:
            raise ValueError(
                f"the run has {steps} steps; it needs at least one: more data, more epochs, or fewer batches per step"
            )
        return steps

    def _describe(self) -> str:
        """Returns the JSON that identifies the run: options that change a step, and the data."""
        files = self.data.files if self.reads_tokens else None
        run = json.loads(_deepwell.training_describe(self.options, files))
        options = run["options"]
        if not state.is_adamw(self.optimizer) or self._own_rates:
            kind = type(self.optimizer)
            options["optimizer"] = f"{kind.__module__}.{kind.__qualname__}"
            for key in ("beta1", "beta2", "eps", "weight_decay", "decay_all"):
                options.pop(key)
            options["lr"] = self.peaks
        if not self.reads_tokens:
            for key in ("sequence", "batch", "micro_batch"):
                options.pop(key)
            options["accumulate"] = self.accumulate
        return json.dumps(run)

    # ---- the run ---------------------------------------------------------------------------------

    def fit(self, steps: int | None = None) -> FitResult:
        """Trains until ``steps`` steps are done in all (default: the run's).

        SIGTERM and SIGINT end the run after the current step with a checkpoint, and then SystemExit(143) or
        KeyboardInterrupt is raised; a second signal acts at once. A failure leaves the weights and the position in
        memory, and the next ``fit`` continues.
        """
        if steps is not None:
            self.steps = steps
            self.options["steps"] = steps
            self._describe()
        self._stop_wanted, self._stopping, self._signal = False, False, None
        try:
            self._open()
            self._begin()
            with self._signals():
                self._call("on_start")
                while self.step < self.steps and not self._stopping:
                    self._advance()
                    if self.ranks == 1:
                        self._stopping = self._stop_wanted
                self._settle()
                self._finish()
        finally:
            self._forget_queued()
            self._close()
            self._call("on_end")
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            raise SystemExit(128 + self._signal)
        return self._result

    def stop(self) -> None:
        """Ends ``fit`` after the current step, or on several ranks after the next one, with a checkpoint."""
        self._stop_wanted = True

    def save(self, path: str | os.PathLike) -> None:
        """Writes a checkpoint to ``path``, whole or not at all: weights, optimizer, plan, policy, data position, random state.

        It replaces an earlier checkpoint there. ``Trainer(..., resume=path)`` continues from it, and transformers loads
        it as a model.
        """
        self._settle()
        if self._checkpoints is not None:
            self._checkpoints.wait()
        snapshot = self._snapshot()
        if snapshot is not None:
            write_alone(os.fspath(path), snapshot)
        self._barrier()

    def _open(self) -> None:
        if self.folder is not None and self.rank == 0 and self._checkpoints is None:
            self._checkpoints = Checkpoints(self.folder)

    def _begin(self) -> None:
        """Resumes, once, and opens the log."""
        if not self._begun:
            step, path = self._find_checkpoint()
            if path:
                self._load(path)
            self._begun = True
            self._resumed = bool(path) or self.resume is True
            if self.show and path:
                print(f"step {self.step}  resumed from {path}", flush=True)
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        self._trained = list(zip(state.names_of(self.module, self.optimizer), params))
        self._printer = printing.Printer(self.steps, self.report_every) if self.show else None
        if self.rank == 0 and self.log_path is not None:
            self._log = printing.Log(self.log_path, self.step, self._resumed)
        if self.rank == 0 and self.tensorboard_path is not None:
            self._board = printing.tensorboard(self.tensorboard_path, self.step)
        self._resumed = True  # a second fit continues the log
        self._saved_at = time.monotonic()
        self._finished_at = time.perf_counter()

    def _find_checkpoint(self) -> tuple[int, str]:
        found: list[Any] = [-1, ""]
        if self._checkpoints is not None:
            found = list(self._checkpoints.newest())
            if found[1] and self.resume is False:
                raise DeepwellError(
                    f'"{os.fspath(self.folder)}" holds checkpoints of an earlier run, up to step {found[0]}; resume it '
                    "(resume=True), or name another folder"
                )
        if not found[1] and not isinstance(self.resume, bool):
            found = [0, os.fspath(self.resume)]
        if self.ranks > 1:
            dist.broadcast_object_list(found, src=0)
        return found[0], found[1]

    def _set_precision(self) -> None:
        """Gives the model the policy of the next step, if that is another one."""
        if self._watch is None:
            return
        step = self.step + 1
        policy = self._watch.policy_of(step, self.steps)
        if policy is self._policy:
            return
        change_policy(self.model, self._policy, policy)
        self._policy = policy
        if step == self._watch.repair_begins(self.steps):
            self._tell(self._watch.repaired(step))

    def _tell(self, change: dict[str, Any]) -> None:
        """Reports a change of precision."""
        if self._printer is not None:
            self._printer.say(told(change))
        if self._log is not None:
            self._log.write(
                {
                    "step": change.get("sampled_step", change["from_step"]),
                    "precision_change": change,
                }
            )
        self._call("on_precision", change)

    def precision_report(self) -> list[OperandReport]:
        """Returns the rounding of each operand of each layer in the newest sampled step; empty before the first one."""
        return [] if self._watch is None else list(self._watch.last)

    @property
    def precision_changes(self) -> list[dict[str, Any]]:
        """The layers that fell back to BF16 and why, and the repair, in their order, over the whole run."""
        return [] if self._watch is None else list(self._watch.changes)

    def _advance(self) -> None:
        """Runs a step, then the validation and the checkpoint that are due.

        On a GPU a step is judged and reported when the next one has been queued, so that the GPU does not wait for this
        process. Steps that something else follows, and steps after one that was not applied, are waited for.
        """
        self._set_precision()
        earlier, self._queued = self._queued, None
        made = self._run_step()
        if isinstance(made, _Queued):
            self._queued = made
        if earlier is not None:
            self._complete(self._report_of(earlier))
        last = self.step == self.steps
        validates = self.validation is not None and (
            last or bool(self.eval_every and self.step % self.eval_every == 0)
        )
        saves = self.folder is not None and not last and self._save_is_due()
        if isinstance(made, StepReport):
            self._complete(made)
        elif self._bad_in_a_row or last or validates or saves or self._stop_wanted:
            self._settle()
        if validates:
            self._validate()
        if saves and self.last_report.applied:
            self._checkpoint()
        if validates or saves:
            self._finished_at = time.perf_counter()

    def _complete(self, report: StepReport) -> None:
        """Reports a step whose result is known, and acts on it."""
        self.last_report = report
        self.updates += report.applied
        self._report(report)
        if not report.applied:
            self.spikes += report.is_spike
            self._judge(report)
        else:
            self._bad_in_a_row = 0
            if self.spike_factor is not None:
                # One more than a limit takes, because it leaves out the step before its own.
                self._losses = [*self._losses[-self.spike_window :], (report.step, report.loss)]
            if report.operands is not None and self._watch is not None:
                for change in self._watch.judge(report.step, report.operands):
                    self._tell(change)
            if self._checkpoints is not None:
                self._checkpoints.report(self._checkpoint_written)
                self._checkpoints.applied(self.keep)
        self._call("on_step", report)

    def _settle(self) -> None:
        """Completes a step that is still queued."""
        if self._queued is not None:
            queued, self._queued = self._queued, None
            self._complete(self._report_of(queued))

    def _save_is_due(self) -> bool:
        by_time = self.save_minutes is not None and (
            time.monotonic() - self._saved_at >= 60.0 * self.save_minutes
        )
        if self.save_minutes is not None and self.ranks > 1:
            flag = [by_time]
            dist.broadcast_object_list(flag, src=0)
            by_time = flag[0]
        return bool(self.save_every and self.step % self.save_every == 0) or by_time

    def _finish(self) -> None:
        """Writes the last checkpoint and waits for it."""
        newest = -1
        if self._checkpoints is not None:
            newest, _ = self._checkpoints.newest()
            self._checkpoints.report(self._checkpoint_written)
        if self.ranks > 1 and self.folder is not None:
            found = [newest]
            dist.broadcast_object_list(found, src=0)
            newest = found[0]
        if self.folder is not None and newest != self.step and self.step > 0:
            self._checkpoint()
        path = None
        if self._checkpoints is not None:
            _, path = self._checkpoints.newest()
            self._checkpoints.report(self._checkpoint_written)
            if self.step == self.steps:
                self._checkpoints.applied(self.keep)
        if self._signal is not None and self._printer is not None:
            kept = "continue with resume=True" if self.folder is not None else "nothing was saved"
            self._printer.say(f"stopped after step {self.step} of {self.steps}; {kept}")
        loss = self.last_report.loss if self.last_report is not None else None
        self._result = FitResult(self.step, loss, self.validation_loss, path or None)

    def _close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None
        if self._printer is not None:
            self._printer.close()
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._board is not None:
            self._board.close()
            self._board = None

    def _call(self, name: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, name, None)
            if method is not None:
                method(self, *arguments)

    # ---- a step ----------------------------------------------------------------------------------

    def _run_step(self) -> StepReport | _Queued:
        if not self.model.training:
            self.model.train()
        lr = self._set_rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor | None = None
        tokens = 0
        self.data.begin_step(self.step)
        limit = self._spike_limit()
        self._loads.begin_step()
        with self._sampled() as sample, self._same_weights():
            for micro in range(self.accumulate):
                batch = sources.move(self.data.next(), self.device)
                tokens += _tokens_of(batch)
                self._loads.begin_batch()
                with self._without_sync(micro < self.accumulate - 1):
                    one = self._loss(self.model, batch)
                    if self._loads:
                        self._loads.end_batch(self.device)
                    if self.accumulate > 1:
                        one = one / self.accumulate
                    one.backward()
                loss = one.detach() if loss is None else loss + one.detach()
        tokens *= self.ranks
        layers, observed = self._statistics(sample)
        loads = self._over_ranks(self._loads.numbers())
        outcome = None
        if self._updates_on_gpu:
            # The GPU does not apply a step whose loss is not finite.
            judged = loss if limit is None else torch.where(loss > limit, math.inf, loss)
            most = self.clip if self.clip > 0 else math.inf
            outcome = self.optimizer.step_if_finite(judged, most)
        if outcome is not None:
            self.step += 1
            numbers = [loss.double().reshape(1), outcome]
            if observed is not None:
                numbers.append(observed.flatten().to(outcome.device))
            if loads is not None:
                numbers.append(loads.to(outcome.device))
            count = 0 if loads is None else loads.numel()
            queued = self._queue(lr, tokens, torch.cat(numbers), limit, layers, count)
            if self._waits_for_no_step():
                return queued
            return self._report_of(queued, named=True)
        named = [each for each in self._trained if each[1].grad is not None]
        norm = state.gradient_norm([param.grad for _, param in named])
        loss_value, norm_value = self._numbers(loss, norm)
        self.step += 1
        applied = math.isfinite(loss_value) and math.isfinite(norm_value)
        applied = applied and (limit is None or loss_value <= limit)
        if applied:
            self._update([param for _, param in named], norm_value)
        report = self._finished(self.step, loss_value, norm_value, lr, tokens, applied, named=True)
        report.spike_limit = limit
        if observed is not None:
            report.operands = reports(layers, observed)
        if loads is not None:
            report.experts = self._loads.loads(loads.tolist(), self.accumulate * self.ranks)
        return report

    @contextlib.contextmanager
    def _sampled(self) -> Iterator[Sample | None]:
        """Observes the operands of the step that runs inside the context, if the guard samples it."""
        watch = self._watch
        if watch is None or not watch.samples(self.step + 1, self.steps):
            yield None
            return
        with sample_precision(self.model) as sample:
            yield sample

    def _same_weights(self) -> ContextManager[None]:
        """Is entered for the micro-batches of a step, so that their weights are quantized once."""
        once = self.quantize_once and self.accumulate > 1
        return same_weights(self.model) if once else contextlib.nullcontext()

    def _statistics(
        self, sample: Sample | None
    ) -> tuple[list[dict[str, Any]], torch.Tensor | None]:
        """Returns the layers of a sample and their sums over all ranks, where they were computed."""
        if sample is None:
            return [], None
        layers, numbers = sample.layers, sample.numbers()
        return over_ranks(layers, numbers, self.device) if self.ranks > 1 else (layers, numbers)

    def _over_ranks(self, numbers: torch.Tensor | None) -> torch.Tensor | None:
        """Sums numbers over all ranks, where they are."""
        if numbers is not None and self.ranks > 1:
            dist.all_reduce(numbers)
        return numbers

    def _spike_limit(self) -> float | None:
        """Returns the loss above which the next step is a spike, or None if too few losses are known. It leaves out the
        step before, whose loss a GPU may not have computed yet."""
        if self.spike_factor is None:
            return None
        known = [loss for step, loss in self._losses if step < self.step][-self.spike_window :]
        if len(known) < min(self.spike_window, _LEAST_LOSSES):
            return None
        mean = math.fsum(known) / len(known)
        return self.spike_factor * mean if mean > 0.0 else None

    def _waits_for_no_step(self) -> bool:
        """Whether a step may be judged after the next one has begun: nothing looks at each step, and none was bad."""
        watched = any(hasattr(callback, "on_step") for callback in self.callbacks)
        return not watched and self._bad_in_a_row == 0 and self.max_bad_steps > 1

    def _queue(
        self,
        lr: float,
        tokens: int,
        numbers: torch.Tensor,
        limit: float | None,
        layers: list[dict[str, Any]],
        loads: int,
    ) -> _Queued:
        if not numbers.is_cuda:
            return _Queued(self.step, lr, tokens, numbers, None, limit, layers, loads)
        pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        pinned.copy_(numbers, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return _Queued(self.step, lr, tokens, pinned, copied, limit, layers, loads)

    def _forget_queued(self) -> None:
        """Counts the update of a step that is still queued when ``fit`` fails, so that the next ``fit`` continues."""
        if self._queued is not None:
            queued, self._queued = self._queued, None
            self.updates += self._report_of(queued).applied

    def _report_of(self, queued: _Queued, named: bool = False) -> StepReport:
        """Waits for a queued step. ``named``: its gradients are still in memory."""
        if queued.copied is not None:
            queued.copied.synchronize()
        loss = float(queued.numbers[0])
        norm, applied = optim.outcome_of(queued.numbers[1:3])
        report = self._finished(queued.step, loss, norm, queued.lr, queued.tokens, applied, named)
        report.spike_limit = queued.spike_limit
        end = len(queued.numbers) - queued.loads
        if queued.layers:
            report.operands = reports(queued.layers, queued.numbers[3:end])
        if queued.loads:
            report.experts = self._loads.loads(
                queued.numbers[end:].tolist(), self.accumulate * self.ranks
            )
        return report

    def _finished(
        self,
        step: int,
        loss: float,
        norm: float,
        lr: float,
        tokens: int,
        applied: bool,
        named: bool,
    ) -> StepReport:
        culprit = ""
        if not applied:
            culprit = "" if math.isfinite(loss) and math.isfinite(norm) else "the loss"
            if culprit and math.isfinite(loss):
                with_gradients = self._trained if named else []
                culprit = state.first_not_finite(with_gradients, state.gradient_norm)
            if named:
                self.optimizer.zero_grad(set_to_none=True)
        now = time.perf_counter()
        seconds, self._finished_at = now - self._finished_at, now
        return StepReport(step, loss, norm, lr, seconds, applied, culprit, tokens)

    def _set_rate(self) -> float:
        rate = _deepwell.learning_rate(self.options, self.step + 1)
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            value = peak * rate if self._own_rates else rate
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value
        return float(self.optimizer.param_groups[0]["lr"])

    def _loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        context: Any = contextlib.nullcontext()
        if self.autocast is not None:
            context = torch.autocast(self.device.type, self.autocast)
        with context:
            if self.loss_fn is not None:
                loss = self.loss_fn(model, batch)
            elif isinstance(batch, Mapping):
                output = model(**batch)
                loss = (
                    output.get("loss")
                    if isinstance(output, Mapping)
                    else getattr(output, "loss", None)
                )
                if isinstance(loss, torch.Tensor) and model.training:
                    loss = loss + DeepwellMoE.losses_of(self.module)
            else:
                raise ValueError(
                    f"a batch is a {type(batch).__name__}; expected a dict for model(**batch).loss: give "
                    "loss_fn=lambda model, batch: ..."
                )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ValueError(
                "the model returned no loss: put labels into the batches, or give loss_fn=lambda model, batch: ..."
            )
        return loss.reshape(())

    @contextlib.contextmanager
    def _without_sync(self, active: bool) -> Iterator[None]:
        """Gradients of several ranks are averaged in the last batch of a step only."""
        sharded = hasattr(self.model, "set_requires_gradient_sync")
        if sharded:
            self.model.set_requires_gradient_sync(not active)
        waits = active and not sharded and hasattr(self.model, "no_sync")
        with self.model.no_sync() if waits else contextlib.nullcontext():
            yield

    def _numbers(self, loss: torch.Tensor, norm: float | torch.Tensor) -> tuple[float, float]:
        """Returns the loss, a mean over ranks, and the norm, in one wait for the device.

        On several ranks it also decides whether all of them stop, so that they do so after the same step.
        """
        if self.ranks == 1 and not isinstance(norm, torch.Tensor):
            return float(loss), norm
        shared = torch.stack(
            [loss.double() / self.ranks, loss.new_tensor(self._stop_wanted).double()]
        )
        if self.ranks > 1:
            dist.all_reduce(shared)
        norm = torch.as_tensor(norm, dtype=torch.float64, device=loss.device)
        mean, stop, norm_value = torch.cat([shared, norm.reshape(1)]).tolist()
        self._stopping = self.ranks > 1 and stop > 0.0
        return mean, norm_value

    def _update(self, params: list[torch.Tensor], norm: float) -> None:
        if self.clip > 0:
            factor = self.clip / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
            if factor < 1.0:
                torch._foreach_mul_([param.grad for param in params], factor)
        self.optimizer.step()

    # ---- divergence ------------------------------------------------------------------------------

    def _judge(self, report: StepReport) -> None:
        """Goes back to the newest checkpoint after too many bad steps in a row, or fails."""
        self._bad_in_a_row += 1
        last = report.step == self.steps
        if self._bad_in_a_row < self.max_bad_steps and not last:
            return
        target = [-1, ""]
        if self._checkpoints is not None and not last:
            target = list(self._checkpoints.newest())
            self._checkpoints.report(self._checkpoint_written)
        if self.ranks > 1:
            dist.broadcast_object_list(target, src=0)
        step, path = target
        if path and self._rollbacks.get(step, 0) < self.max_rollbacks:
            self._rollbacks[step] = self._rollbacks.get(step, 0) + 1
            self._roll_back(step, path)
            return
        rows = f"{self._bad_in_a_row} step{'s' if self._bad_in_a_row > 1 else ''} in a row"
        what = f"not finite ({report.not_finite}; loss"
        if report.is_spike:
            what = f"bad (the last loss is a spike, above {report.spike_limit:g}; loss"
        raise DivergenceError(
            f"training has diverged: {rows} up to step {report.step} {what} "
            f"{report.loss:g}, gradient norm {report.gradient_norm:g}) and not applied; resume from an earlier "
            "checkpoint with a smaller learning rate or a longer warm-up"
        )

    def _roll_back(self, step: int, path: str) -> None:
        """Weights and optimizer are the checkpoint's again. Steps, data and random numbers go on, past the bad batches."""
        kept = self._read_trainer(path)
        manifest = json.loads(_deepwell.checkpoint_verify(path, "{}"))
        self._load_tensors(path, kept, manifest["updates"])
        self.updates = manifest["updates"]
        self._bad_in_a_row = 0
        self._losses = []  # those of other weights
        if self._printer is not None:
            self._printer.say(f"step {self.step}  back to the weights of {path}")
        if self._log is not None:
            self._log.write({"step": self.step, "rollback_to": step})
        self._call("on_rollback", step)

    # ---- validation ------------------------------------------------------------------------------

    def evaluate(self) -> float:
        """Returns the mean loss of the batches of eval_dataloader, without dropout and without gradients."""
        if self.validation is None:
            raise ValueError("there is no validation data; give eval_dataloader=")
        limit = self.eval_batches or self.validation.length
        kept = random_state.capture()
        modes = [(module, module.training) for module in self.model.modules()]
        total, count = torch.zeros((), dtype=torch.float64), 0
        self.model.eval()
        try:
            with torch.no_grad():
                for batch in self._validation_batches(limit):
                    loss = self._loss(self.model, sources.move(batch, self.device))
                    total += loss.double().cpu()
                    count += 1
        finally:
            for module, training in modes:
                module.training = training
            random_state.restore(kept)
        if self.ranks > 1:
            pair = torch.tensor([float(total), float(count)], device=self.device)
            dist.all_reduce(pair)
            return float(pair[0] / pair[1])
        return float(total / max(count, 1))

    def _validation_batches(self, limit: int | None) -> Iterator[Any]:
        source = self.validation
        if isinstance(source, sources.TokenFiles):
            source.calls = 0
            for _ in range(min(limit, source.length)):
                yield source.next()
            return
        for count, batch in enumerate(source.loader):
            if limit is not None and count >= limit:
                return
            yield batch

    def _validate(self) -> None:
        loss = self.evaluate()
        self.validation_loss = loss
        if self._printer is not None:
            self._printer.say(f"step {self.step}  validation loss {loss:.4f}")
        if self._log is not None:
            self._log.write(printing.validation_line(self.step, loss))
        if self._board is not None:
            self._board.add_scalar("validation_loss", loss, self.step)
        self._call("on_evaluate", self.step, loss)

    # ---- reports ---------------------------------------------------------------------------------

    def _report(self, report: StepReport) -> None:
        if self._printer is not None:
            self._printer.step(report)
        if self._log is not None:
            self._log.write(printing.step_line(report))
        if self._board is not None:
            for name in ("loss", "gradient_norm", "lr"):
                self._board.add_scalar(name, getattr(report, name), report.step)
            for name, value in printing.precision_numbers(report).items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"precision/{name}", value, report.step)
            for each in report.experts or ():
                for name in ("imbalance", "dropped", "entropy"):
                    value = getattr(each, name)
                    self._board.add_scalar(f"experts/{each.layer}/{name}", value, report.step)

    # ---- checkpoints -----------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        """Copies the state and begins to write it."""
        if self._checkpoints is not None:
            self._checkpoints.wait()  # at most one copy in memory
            self._checkpoints.report(self._checkpoint_written)
            if self.last_report is not None and self.last_report.applied:
                self._checkpoints.applied(self.keep)
        if self._log is not None:
            self._log.sync()
        snapshot = self._snapshot()
        if snapshot is not None and self._checkpoints is not None:
            self._checkpoints.write(snapshot)
        self._saved_at = time.monotonic()

    def _checkpoint_written(self, step: int, path: str) -> None:
        if self._printer is not None:
            self._printer.say(f"step {step}  checkpoint {path}")
        self._call("on_checkpoint", step, path)

    def _snapshot(self) -> Snapshot | None:
        """Returns a copy of the whole state on rank 0, None on the others, which take part."""
        writes = self.rank == 0
        randoms: list[Any] = [self._random or random_state.capture()]
        if self.ranks > 1:
            every: list[Any] = [None] * self.ranks
            dist.all_gather_object(every, randoms[0])
            randoms = every
        tensors, rest = state.split_optimizer(self.module, self.optimizer)
        model = state.copies(state.tensors_of(self.module), writes)
        optimizer = state.copies(tensors, writes)
        if not writes:
            return None
        trainer = {
            "version": 1,
            "ranks": self.ranks,
            "random": randoms,
            "data": self.data.state(),
            "optimizer": rest,
            "tied": state.tied_of(self.module),
            "precision": _policy(self.precision),
            "callbacks": [
                each.state_dict() if hasattr(each, "state_dict") else None
                for each in self.callbacks
            ],
        }
        return Snapshot(
            step=self.step,
            updates=self.updates,
            schedule_steps=self.options["schedule_steps"],
            run=self._run_of_checkpoint(),
            model=model,
            optimizer=optimizer,
            trainer=trainer,
            texts={**texts_of(self.module, self.plan), **self._policy_text()},
            tokenizer=self.tokenizer,
        )

    def _run_of_checkpoint(self) -> str:
        """Returns what a manifest says of the run: what identifies it, the state of its guard, and the losses that limits
        for spikes are made of."""
        run = json.loads(self._describe())
        if self._watch is not None:
            run.update(self._watch.state())
        if self._losses:
            run["losses"] = self._losses
        return json.dumps(run)

    def _policy_text(self) -> dict[str, str]:
        """Returns the policy of the next step, as a file, if a guard may have changed it; without the repair."""
        if self._watch is None:
            return {}
        return {"precision.json": self._watch.unrepaired(self.step + 1).to_json()}

    # ---- resuming --------------------------------------------------------------------------------

    def _read_trainer(self, path: str) -> dict[str, Any] | None:
        """None: `deepwell train` wrote the checkpoint."""
        try:
            with open(os.path.join(path, TRAINER), encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return None

    def _load_tensors(self, path: str, kept: dict[str, Any] | None, updates: int) -> None:
        state.read_into(path, state.tensors_of(self.module))
        state.load_optimizer(
            self.module,
            self.optimizer,
            path,
            kept["optimizer"] if kept is not None else None,
            updates,
        )

    def _load(self, path: str) -> None:
        if state.is_distributed(path) and not os.path.exists(os.path.join(path, "manifest.json")):
            raise DeepwellError(
                f'"{path}" is a folder of torch.distributed.checkpoint of another program; convert it (deepwell reshard '
                "FOLDER -o OUT --like MODEL), and resume from the result"
            )
        manifest = json.loads(_deepwell.checkpoint_verify(path, self._describe()))
        if manifest["step"] > self.steps:
            raise DeepwellError(
                f'the checkpoint "{path}" is of step {manifest["step"]}, but steps is {self.steps}; give at least the '
                "checkpoint's"
            )
        converted = bool(manifest.get("converted"))
        if not self.schedule_is_given and not converted:
            self.options["schedule_steps"] = manifest["schedule_steps"]
            self._describe()
        kept = self._read_trainer(path)
        if kept is None and not self.reads_tokens:
            raise DeepwellError(
                f'"{path}" has no {TRAINER}: `deepwell train` wrote it, and its data are token files; give their paths '
                "as the dataloader"
            )
        self._load_tensors(path, kept, manifest["updates"])
        self.step, self.updates = manifest["step"], manifest["updates"]
        if self._watch is not None:
            self._watch.restore(manifest)
        if self.spike_factor is not None:  # else a later run would find losses of long ago
            self._losses = [(step, loss) for step, loss in manifest.get("losses", [])]
        if kept is None or converted:
            self._restore_without_position(path)
            return
        self._check_ranks(path, kept)
        position = kept["data"]
        if kept["ranks"] != self.ranks:
            position = self.data.on_other_ranks(position, kept["ranks"], self.ranks)
        self._random = kept["random"][self.rank % len(kept["random"])]
        self.data.restore(position, self.step, self._set_random)
        for callback, saved in zip(self.callbacks, kept["callbacks"]):
            if saved is not None and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(saved)

    def _restore_without_position(self, path: str) -> None:
        """The checkpoint has no random state and no position in the data; that of token files is the step."""
        torch.manual_seed(self.options["seed"] + self.step)
        if self.reads_tokens:
            self.data.restore({"kind": "tokens"}, self.step, lambda: None)
            return
        warnings.warn(
            f'"{path}" was made of another program\'s checkpoint, which has no position in the data; the dataloader '
            "begins anew",
            stacklevel=2,
        )

    def _set_random(self) -> None:
        if self._random is not None:
            random_state.restore(self._random)
        self._random = None

    def _check_ranks(self, path: str, kept: dict[str, Any]) -> None:
        if kept["ranks"] == self.ranks:
            return
        ranks = f'the checkpoint "{path}" is of a run on {kept["ranks"]} ranks, and this one has {self.ranks}'
        if not self.elastic:
            raise DeepwellError(
                f"{ranks}; give elastic=True to go on with other bits, or as many ranks"
            )
        if not self.data.elastic:
            raise DeepwellError(
                f"{ranks}; the position of this dataloader cannot be converted: use token files, a dataset, or a "
                "DataLoader over a map-style dataset"
            )

    # ---- signals and ranks -----------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal ends the run after the step; then the handlers from before are in place again."""
        before: dict[int, Any] = {}

        def give_back() -> None:
            while before:
                number, handler = before.popitem()
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

        def note(number: int, frame: Any) -> None:
            self._signal, self._stop_wanted = number, True
            give_back()

        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before[number] = signal.signal(number, note)
        try:
            yield
        finally:
            give_back()

    def _barrier(self) -> None:
        if self.ranks > 1:
            dist.barrier()


def _rank() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _device_of(model: torch.nn.Module) -> torch.device:
    devices = {each.device for each in model.parameters()}
    if not devices:
        raise ValueError("the model has no parameters; there is nothing to train")
    if len(devices) > 1:
        names = ", ".join(sorted(str(each) for each in devices))
        raise ValueError(f"the model's parameters are on {names}; Trainer needs them on one device")
    return devices.pop()


def _optimizer_class(name: str) -> Any:
    classes = {"adamw_dw": optim.AdamW, "adamw": torch.optim.AdamW, "muon": Muon}
    if name not in classes:
        raise ValueError(
            f'optimizer is "{name}"; use one of {", ".join(sorted(classes))}, or give an optimizer or a function that '
            "makes one"
        )
    return classes[name]


def _tokens_of(batch: Any) -> int:
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
        return batch["input_ids"].numel()
    return 0


def _policy(precision: Any) -> Any:
    """Returns a precision or a policy as JSON."""
    for name in ("to_json", "to_dict"):
        method = getattr(precision, name, None)
        if callable(method):
            value = method()
            return json.loads(value) if isinstance(value, str) else value
    if precision is None or isinstance(precision, str):
        return precision
    name = getattr(precision, "name", None)
    return name if isinstance(name, str) else type(precision).__name__
