"""Tokens, windows over them, and the order in which Grain hands them out."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import grain
import numpy as np

from dropless.train.config import BYTE_VOCABULARY, RunConfig
from dropless.train.errors import UserError
from dropless.train.text import Text


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One part of the text as tokens."""

    ids: np.ndarray  # [tokens] uint8 (bytes) or int32
    bytes_per_token: float  # 1 for bytes; turns nats a token into nats a byte


class Windows:
    """A random-access Grain source; window i is ``seq_len`` tokens and the one after them."""

    def __init__(self, ids: np.ndarray, seq_len: int):
        self._ids = ids
        self._seq_len = seq_len

    def __len__(self) -> int:
        return (len(self._ids) - 1) // self._seq_len

    def __getitem__(self, index: int) -> np.ndarray:
        """Window ``index``, ``[seq_len + 1] int32``."""
        start = int(index) * self._seq_len
        return self._ids[start : start + self._seq_len + 1].astype(np.int32)

    def __repr__(self) -> str:
        return f"Windows(tokens={len(self._ids)}, seq_len={self._seq_len})"


def tokenize(text: Text, tokenizer: str | None) -> tuple[Tokens, Tokens, int]:
    """The training tokens, the held-out tokens and the vocabulary's size.

    Without a tokenizer file a token is a byte. With one (the JSON of the ``tokenizers`` library),
    bytes that are not UTF-8 become U+FFFD first, since such tokenizers read characters; nats a byte
    still count the bytes of the files.
    """
    if tokenizer is None:
        train, held_out = (
            Tokens(np.frombuffer(b"".join(part), np.uint8), 1.0)
            for part in (text.train, text.held_out)
        )
        return train, held_out, BYTE_VOCABULARY
    encoder = _load_tokenizer(tokenizer)
    train, held_out = (_encode(encoder, part) for part in (text.train, text.held_out))
    return train, held_out, encoder.get_vocab_size(with_added_tokens=True)


def _load_tokenizer(path: str) -> Any:
    if not pathlib.Path(path).is_file():
        raise UserError(f"the tokenizer file {path} does not exist.")
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            "--tokenizer needs the tokenizers package; pip install tokenizers."
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{path} is not a file of the tokenizers library: {error}.") from error


def _encode(encoder: Any, documents: list[bytes]) -> Tokens:
    texts = [document.decode("utf-8", errors="replace") for document in documents]
    encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
    ids = np.concatenate(
        [np.zeros(0, np.int32), *(np.asarray(item.ids, np.int32) for item in encodings)]
    )
    return Tokens(ids, sum(map(len, documents)) / max(len(ids), 1))


def check_length(train: Tokens, held_out: Tokens, seq_len: int) -> None:
    """Raises ``UserError`` unless each part holds at least one window."""
    sizes, window = (len(train.ids), len(held_out.ids)), seq_len + 1
    advice = "name more text or lower --seq-len"
    if sum(sizes) < window:
        raise UserError(
            f"the text is shorter than one window: it has {sum(sizes)} tokens, and {window} are "
            f"needed; {advice}."
        )
    if min(sizes) < window:
        raise UserError(
            f"the text is too short for one window to train on and another to hold out: it has "
            f"{sum(sizes)} tokens, and {2 * window} are needed; {advice}."
        )


def training_batches(tokens: Tokens, config: RunConfig) -> grain.DatasetIterator:
    """An endless iterator over ``[batch_size, seq_len + 1] int32`` batches, shuffled anew in each
    epoch.

    Its ``get_state`` and ``set_state`` continue it exactly; what it yields depends on the text, the
    window, the batch size and the seed alone.
    """
    return iter(
        grain.MapDataset.source(Windows(tokens.ids, config.seq_len))
        .seed(config.seed)
        .shuffle()
        .repeat()
        .batch(config.batch_size, drop_remainder=True)
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
    )


def held_out_batches(tokens: Tokens, config: RunConfig) -> list[np.ndarray]:
    """The held-out windows of every evaluation: evenly spread, whole batches, at least one.

    A text with fewer windows than a batch repeats them; each window then counts equally often, or
    nearly.
    """
    windows = Windows(tokens.ids, config.seq_len)
    batches = max(1, min(config.eval_windows, len(windows)) // config.batch_size)
    count = batches * config.batch_size
    indices = np.arange(count) * len(windows) // count
    chosen = np.stack([windows[index] for index in indices])
    return list(chosen.reshape(batches, config.batch_size, config.seq_len + 1))
