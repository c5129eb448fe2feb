"""A run from its first step to its report."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import rich.console
from absl import logging as absl_logging

from dropless.train import data as text_data
from dropless.train import report
from dropless.train.breakdown import time_parts
from dropless.train.checkpoint import Checkpoints, check_folder
from dropless.train.config import RunConfig, write_run_file
from dropless.train.device import Device, choose_device, make_mesh
from dropless.train.errors import UserError
from dropless.train.feed_forward import compute_dtype, make_feed_forward
from dropless.train.folder import locked, refuse_used_folder
from dropless.train.metrics import Events, MetricsLog, make_record, read_metrics
from dropless.train.progress import Progress
from dropless.train.step import init_state, make_eval_step, make_train_step
from dropless.train.text import read_text

# Steps in flight before the oldest one's figures are fetched: one runs while the next is queued.
_STEPS_IN_FLIGHT = 2
# What shells report for a program that SIGINT ended.
_INTERRUPTED = 130


def train(config: RunConfig, out: pathlib.Path, fingerprint: dict[str, Any] | None) -> int:
    """Trains as ``config`` says and leaves everything in ``out``; returns the exit code.

    ``fingerprint`` is that of the text of the run to continue, or ``None`` for a new run. Nothing
    is written before the text, the devices and the compiled step are known to be good.

    Raises:
      UserError: the text, the mesh or the run to continue is not as it should be.
    """
    console = rich.console.Console(highlight=False, soft_wrap=True, markup=False)
    absl_logging.set_verbosity(
        absl_logging.ERROR
    )  # Orbax tells its whole story at INFO and WARNING
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)  # device.py says it in words
    text = read_text(config.text, out, window_bytes=config.seq_len + 1)
    train_tokens, held_out_tokens, vocab_size = text_data.tokenize(text, config.tokenizer)
    text_data.check_length(train_tokens, held_out_tokens, config.seq_len)
    read = text.fingerprint()
    if config.tokenizer is not None:
        content = pathlib.Path(config.tokenizer).read_bytes()
        read["tokenizer_sha256"] = hashlib.sha256(content).hexdigest()
    if fingerprint is not None and read != fingerprint:
        raise UserError(
            f"the text is not the one that the run in {out} was started with; restore the files, "
            f"or start a new run with another --out."
        )
    check_folder(out, len(read_metrics(out)))
    config = dataclasses.replace(config, vocab_size=vocab_size)
    device = choose_device(config)
    console.print(f"device: {device.count} x {device.kind} ({device.platform}): {device.reason}")
    console.print(
        f"text: {text.source}: {text.files} files, {read['train_bytes']:,} bytes to train on; "
        f"{text.split}; {text.skipped} files passed over"
    )
    run = _Run(config, out, device, console, train_tokens, held_out_tokens)
    run.compile()
    with locked(out):
        if fingerprint is None:
            refuse_used_folder(out)  # once more: another process may have trained there meanwhile
        return run.go(functools.partial(write_run_file, out, config, read))


class _Clock:
    """Wall time by what it was spent on."""

    def __init__(self):
        self.seconds: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


class _Run:
    """One run's moving parts."""

    def __init__(
        self,
        config: RunConfig,
        out: pathlib.Path,
        device: Device,
        console: rich.console.Console,
        train_tokens: text_data.Tokens,
        held_out_tokens: text_data.Tokens,
    ):
        self.config, self.out, self.device, self.console = config, out, device, console
        self.train_tokens, self.held_out_tokens = train_tokens, held_out_tokens
        self.mesh = make_mesh(config)
        self.dtype = compute_dtype(config, device.platform)
        self.clock = _Clock()
        self.ffn = _in_words(make_feed_forward, config, self.mesh)
        self.stop_requested = False
        self.in_flight: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()
        self.last_done = 0.0

    def compile(self) -> None:
        """Makes the initial state and compiles both steps."""
        shape = (self.config.batch_size, self.config.seq_len + 1)
        batch = self._put(np.zeros(shape, np.int32))
        with self.clock.on("compile"), self.console.status("compiling"):
            self.state = jax.jit(
                lambda: init_state(self.config, self.ffn), out_shardings=self._sharding()
            )()
            step = make_train_step(self.config, self.ffn, self.dtype, self._sharding())
            self.train_step = _in_words(lambda: step.lower(self.state, batch).compile())
            evaluate = make_eval_step(self.config, self.ffn, self.dtype)
            self.eval_step = evaluate.lower(self.state["params"], batch).compile()
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self.state["params"]))
        self.console.print(
            f"model: {parameters:,} parameters, {self.config.ffn}, activations in "
            f"{self.dtype.name}; compiled in {self.clock.seconds['compile']:.1f} s"
        )

    def _sharding(self, *axes: str) -> jax.sharding.Sharding:
        """Of arrays whose first dimensions lie along mesh axes; without a mesh, of any array."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*axes))

    def _put(self, batch: np.ndarray) -> jax.Array:
        """A host batch ``[B, S+1]`` on the devices, B spread over the data axis."""
        return jax.device_put(batch, self._sharding("data"))

    def go(self, save_settings: Callable[[], None]) -> int:
        """Trains from the newest checkpoint, or from the start, to the last step.

        ``save_settings`` is called once it is clear that the run can go on: when it has found its
        checkpoint, or before its first step is recorded. A new run that fails before, for want of
        memory, leaves a folder that another may use; whatever a kill leaves after can be resumed.
        """
        checkpoints = Checkpoints(self.out)
        batches = text_data.training_batches(self.train_tokens, self.config)
        first = 0
        restored = checkpoints.restore(self.state, self.console.print)
        if restored is not None:
            first, self.state, data_state = restored
            batches.set_state(data_state)
            self.console.print(f"resuming after step {first}")
        elif read_metrics(self.out):  # a kill before the first save leaves this
            self.console.print("there is no complete checkpoint: starting again from step 1")
        if first >= self.config.steps:
            self.console.print(f"step {first} is the last already; a larger --steps goes on")
        self.held_out = text_data.held_out_batches(self.held_out_tokens, self.config)
        self.log, self.events = MetricsLog(self.out, first), Events(self.out, first)
        self.checkpoint, self.save_settings = first, save_settings
        if first:
            self._settle()
        with (
            _stop_on_signal(self),
            Progress(first, self.config.steps, self.console) as self.progress,
        ):
            try:
                last = self._steps(first, batches, checkpoints)
            finally:
                with self.clock.on("checkpoint"):
                    checkpoints.close()
                self.log.close()
                self.events.close()
        return self._finish(last)

    def _steps(self, first: int, batches: Iterator[np.ndarray], checkpoints: Checkpoints) -> int:
        """The steps after ``first``; returns the number of the last one done."""
        self.last_done = time.perf_counter()
        step, stopping = first, False
        while step < self.config.steps and not stopping:
            step += 1
            with self.clock.on("data"):
                batch = self._put(next(batches))
            with self.clock.on("dispatch"):
                self.state, figures = self.train_step(self.state, batch)
            self.in_flight.append((step, figures))
            last, stopping = step == self.config.steps, self.stop_requested
            if last or step % self.config.eval_every == 0:
                self._drain(evaluate=True)
            elif len(self.in_flight) > _STEPS_IN_FLIGHT:
                self._record(*self.in_flight.popleft())
            if last or stopping or step % self.config.checkpoint_every == 0:
                self._drain()
                with self.clock.on("checkpoint"):
                    self.log.sync()
                    checkpoints.save(step, self.state, batches.get_state())
                    self.checkpoint = step
                self.last_done = time.perf_counter()
        return step

    def _settle(self) -> None:
        """Stores the settings, the first time it is called."""
        self.save_settings()
        self.save_settings = lambda: None

    def _drain(self, evaluate: bool = False) -> None:
        """Records every step in flight, the last one with the held-out loss if ``evaluate``."""
        while self.in_flight:
            step, figures = self.in_flight.popleft()
            self._record(step, figures, evaluate and not self.in_flight)

    def _record(self, step: int, figures: dict[str, jax.Array], evaluate: bool = False) -> None:
        with self.clock.on("wait for the device"):
            fetched = jax.device_get(figures)
        now = time.perf_counter()
        record = make_record(
            step,
            fetched,
            now - self.last_done,
            self.config.tokens_per_step,
            self.train_tokens.bytes_per_token,
        )
        self.last_done = now
        self._settle()
        if record["loss"] is None or record["grad_norm"] is None:
            self.log.write(record)
            raise self._not_finite(step)
        if evaluate:
            with self.clock.on("evaluate"):
                record["held_out_loss"] = self._held_out_loss()
            if not math.isfinite(record["held_out_loss"]):
                raise self._not_finite(step)
            self.last_done = time.perf_counter()
        with self.clock.on("write"):
            self.log.write(record)
            self.events.write(record)
            self.progress.update(record)

    def _not_finite(self, step: int) -> UserError:
        kept = f"the newest checkpoint is of step {self.checkpoint}"
        return UserError(
            f"the loss or its gradient is not finite at step {step}, so training stopped; "
            f"{kept if self.checkpoint else 'there is no checkpoint yet'}. A lower --learning-rate "
            f"than {self.config.learning_rate:g} usually helps."
        )

    def _held_out_loss(self) -> float:
        losses = [self.eval_step(self.state["params"], self._put(batch)) for batch in self.held_out]
        return float(np.mean(jax.device_get(losses))) / self.held_out_tokens.bytes_per_token

    def _finish(self, last: int) -> int:
        if last < self.config.steps:
            self.console.print(f"stopped after step {last}; --out {self.out} --resume continues.")
            return _INTERRUPTED
        ffn = make_feed_forward(self.config)  # without a mesh: the parts are timed on one device
        with self.console.status("timing the parts of a step"):
            parts = time_parts(self.config, self.state["params"], ffn, self.dtype)
        summary = report.write_report(
            self.out, self.config, self.device, dict(self.clock.seconds), parts
        )
        self.console.print(summary)
        return 0


def _in_words(build: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ``build``; what the library rejects is shown as its sentence, without a traceback."""
    try:
        return build(*arguments)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def _stop_on_signal(run: _Run) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the run after this step, with a checkpoint."""

    def handle(number, frame):
        run.stop_requested = True
        signal.signal(number, signal.SIG_DFL)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
