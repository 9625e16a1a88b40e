"""What a run says: a progress bar and tables on the terminal, JSON lines in a file."""

import json
import sys
from typing import Any, TextIO

from meshcast.base.progress import Progress as Lines
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from training.options import Options
from training.verify import Difference

LINES_WITHOUT_TERMINAL = 10
WIDTH_WITHOUT_TERMINAL = 110


class Reporter:
    """Lives on one rank; the others have none."""

    def __init__(self, options: Options) -> None:
        self.options = options
        terminal = sys.stdout.isatty()
        self.console = Console(width=None if terminal else WIDTH_WITHOUT_TERMINAL)
        self.bar: Progress | None = None
        self.lines: Lines | None = None
        self.file: TextIO | None = None
        self.board: Any = None

    def start(self, first_step: int) -> None:
        options = self.options
        stages = " -> ".join(map(str, options.run.stages))
        job = options.job
        size = f"{job.parameters() / 1e6:.2f} M parameters, {job.layers} layers"
        pieces = f"{options.run.microbatches} micro-batches of {options.run.microbatch} samples"
        if options.run.passes > 1:
            pieces = f"{options.run.passes} passes of {pieces}"
        self.console.print(f"{job.name}, {size}; stages on {stages} ranks; {options.schedule}, {pieces}")
        if options.metrics is not None:
            options.metrics.parent.mkdir(parents=True, exist_ok=True)
            self.file = options.metrics.open("a")
            self._write(
                event="start",
                name=job.name,
                unit=job.unit,
                loss_unit=job.loss_unit,
                parameters=job.parameters(),
                layers=job.layers,
                stages=[str(stage) for stage in options.run.stages],
                schedule=options.schedule,
                microbatches=options.run.microbatches,
                tolerance=options.tolerance,
            )
        if options.tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(options.tensorboard))
        if self.console.is_terminal:
            columns = [
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.3f}"),
                TextColumn("{task.fields[speed]:,.0f} " + f"{job.unit}/s"),
                TimeRemainingColumn(),
            ]
            self.bar = Progress(*columns, console=self.console)
            self.bar.add_task(
                "training", total=options.steps, completed=first_step, loss=float("nan"), speed=0.0
            )
            self.bar.start()
        else:  # on stderr
            left = options.steps - first_step
            self.lines = Lines("training", left, ticks=False, here=True)
            self.lines.__enter__()

    def step(self, record: dict[str, Any]) -> None:
        """One optimiser step: `record` has at least step, loss and units_per_s."""
        self._write(event="step", **record)
        if self.board is not None:
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float):
                    self.board.add_scalar(name, value, record["step"])
        done = record["step"]
        if self.lines is not None:
            self.lines.done()
        if self.bar is not None:
            self.bar.update(
                self.bar.task_ids[0], completed=done, loss=record["loss"], speed=record["units_per_s"]
            )
        elif done % max(1, self.options.steps // LINES_WITHOUT_TERMINAL) == 0 or done == self.options.steps:
            speed = f"{record['units_per_s']:,.0f} {self.options.job.unit}/s"
            self.console.print(f"step {done}/{self.options.steps}  loss {record['loss']:.3f}  {speed}")

    def _write(self, **record: Any) -> None:
        if self.file is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()

    def stopped(self, done: int) -> None:
        """The run was asked to end before its last step."""
        folder = self.options.checkpoint
        how = "" if folder is None else f"; go on with --checkpoint {folder} --resume"
        self.console.print(f"Stopped by SIGTERM after step {done}{how}.")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.lines is not None:
            self.lines.__exit__(None, None, None)
        if self.file is not None:
            self.file.close()
        if self.board is not None:
            self.board.close()

    def differences(self, found: list[Difference]) -> None:
        """The table of --verify."""
        table = Table(title="Largest absolute difference from training in one process", title_justify="left")
        for header in ("step", "loss", "one process", "difference"):
            table.add_column(header, justify="right")
        for stage in range(len(self.options.run.stages)):
            table.add_column(f"gradients, stage {stage}", justify="right")
        for d in found:
            losses = [f"{d.loss:.6f}", f"{d.reference_loss:.6f}", f"{d.loss_difference:.1e}"]
            table.add_row(str(d.step), *losses, *(f"{g:.1e}" for g in d.gradients))
        self.console.print(table)
        outside = [d.step for d in found if not d.within(self.options.tolerance)]
        if outside:
            steps = ", ".join(str(step) for step in outside)
            self.console.print(
                f"The difference exceeds --tolerance {self.options.tolerance:g} in step {steps}."
            )
        else:
            self.console.print(f"All differences are within {self.options.tolerance:g}.")
