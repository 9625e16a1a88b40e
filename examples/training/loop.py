"""The training loop: start, resume, steps, checks, checkpoints, end."""

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import meshcast  # noqa: F401  (registers the backend)
import torch.distributed as dist

from training import checkpoint
from training.command_line import config_errors_exit
from training.device import take_device
from training.options import Options
from training.report import Reporter
from training.signals import StopRequest
from training.trainer import Trainer
from training.verify import Difference, Verifier


def run(options: Options) -> int:
    """Train as asked. Returns the exit status: 1 where --verify found too large a difference."""
    with config_errors_exit():
        device = take_device(options.device, options.precision)
        samples = options.job.samples(options.seed, options.data)
        folder, first_step = checkpoint.to_resume(options)
    if first_step >= options.steps:
        if int(os.environ["RANK"]) == 0:
            print(f"Nothing to do: {folder} is after step {first_step}, as --steps {options.steps} asks for.")
        return 0
    dist.init_process_group("meshcast")
    try:
        return _train(options, Trainer(options, samples, device), folder, first_step)
    finally:
        dist.destroy_process_group()


def _train(options: Options, trainer: Trainer, folder: Path | None, first_step: int) -> int:
    if folder is not None:
        checkpoint.load(folder, trainer)
    stop = StopRequest()
    verifier = Verifier(trainer) if options.verify else None
    reporter = Reporter(options) if trainer.reports else None
    differences: list[Difference] = []
    units = options.run.batch * options.job.units_per_sample
    if reporter is not None:
        reporter.start(first_step)
    for step in range(first_step, options.steps):
        begin = time.perf_counter()
        result = trainer.gradients(step)
        seconds = time.perf_counter() - begin
        if verifier is not None and step < options.verify:
            differences.append(verifier.compare(step, result.loss))
        begin = time.perf_counter()
        update = trainer.update(step)
        seconds += time.perf_counter() - begin
        done = step + 1
        if options.profile is not None and done == options.steps:  # before an evaluation, which is a step too
            trainer.profile(options.profile)
        record: dict[str, Any] = {"step": done, **asdict(result), **asdict(update)}
        record |= {"seconds": seconds, "units_per_s": units / seconds}
        if done == options.steps or (options.eval_every and done % options.eval_every == 0):
            record["held_out_loss"] = trainer.held_out_loss()
        if reporter is not None:
            if differences and differences[-1].step == done:
                record["reference_loss"] = differences[-1].reference_loss
                record["gradient_differences"] = differences[-1].gradients
            reporter.step(record)
        stopping = stop.agreed()
        due = done % options.checkpoint_every == 0 or done == options.steps or stopping
        if options.checkpoint is not None and due:
            checkpoint.save(options, trainer, done)
        if stopping:
            if options.profile is not None and done < options.steps:
                trainer.profile(options.profile)
            if reporter is not None:
                reporter.stopped(done)
            break
    if reporter is not None:
        reporter.close()
        if differences:
            reporter.differences(differences)
    return 0 if all(d.within(options.tolerance) for d in differences) else 1
