"""What a run shows while it goes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from typing import Any

import rich.console
import rich.progress

from dropless.train.metrics import max_over_mean

_BARS = "▁▂▃▄▅▆▇█"
# Wider than this the little bars push the rest off an 80-column terminal.
_MOST_BARS = 16
# Lines that a run without a terminal prints in all, evaluations apart.
_PLAIN_LINES = 20


def load_bars(counts: list[list[int]]) -> str:
    """Expert load over all layers: bars if experts are few, and the busiest over the mean."""
    if not counts:
        return ""
    total = [sum(layer) for layer in zip(*counts, strict=True)]
    worst = max(max_over_mean(layer) for layer in counts)
    top = max(max(total), 1)
    bars = "".join(_BARS[(count * (len(_BARS) - 1)) // top] for count in total)
    return f"load {bars if len(total) <= _MOST_BARS else ''} max {worst:.2f}x".replace("  ", " ")


class Progress:
    """Shows a run's records. A context manager."""

    def __init__(self, first: int, last: int, console: rich.console.Console):
        self._console = console
        self._plain = not console.is_terminal
        self._every = max(1, (last - first) // _PLAIN_LINES)
        self._last = last
        self._held_out = ""
        columns = (
            rich.progress.BarColumn(bar_width=20),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.TimeRemainingColumn(),
        )
        self._bar = rich.progress.Progress(*columns, console=console, disable=self._plain)
        self._task = self._bar.add_task("starting", total=last, completed=first)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *unused: Any) -> None:
        self._bar.stop()

    def update(self, record: dict[str, Any]) -> None:
        """Shows one step."""
        held_out = record.get("held_out_loss")
        if held_out is not None:
            self._held_out = f" held-out {held_out:.3f}"
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.3f}"
        text = f"loss {loss}{self._held_out} {record['tokens_per_second']:,.0f} tokens/s"
        text = f"{text} {load_bars(record['expert_counts'])}".rstrip()
        step = record["step"]
        self._bar.update(self._task, completed=step, description=text)
        if self._plain and (step % self._every == 0 or held_out is not None or step == self._last):
            self.say(f"step {step}/{self._last}  {text}")

    def say(self, message: str) -> None:
        """Prints a line above the bar."""
        self._console.print(message)
