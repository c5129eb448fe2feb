"""What the training program reads: strangers' folders, the split, windows and their order."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest

from dropless.train import data
from dropless.train.config import resolve
from dropless.train.errors import UserError
from dropless.train.text import read_text
from train_runs import write_text

pytestmark = pytest.mark.any_jax

WINDOW = 17


def config(**overrides):
    return resolve("tiny", {"seq_len": WINDOW - 1, "batch_size": 4, **overrides})


def read(*paths, out="/nowhere"):
    return read_text(tuple(map(str, paths)), pathlib.Path(out), WINDOW)


def test_a_strangers_folder_is_read_as_bytes_and_what_is_no_text_is_passed_over(tmp_path):
    kept = {
        "latin1.txt": "café señor\n".encode("latin-1") * 50,
        "broken-utf8.md": b"\xff\xc3\x28 not utf-8 \xe2\x82\n" * 40,
        "utf16.txt": ("naïve\n" * 30).encode("utf-16"),
        "crlf.csv": b"a,b\r\n1,2\r\n" * 20,
        "sub/deep/name with blanks \u00fc.txt": b"one line without an end" * 9,
        "shiftjis.txt": "\u65e5\u672c\u8a9e\n".encode("shift-jis") * 40,
    }
    passed_over = {
        "image.png": b"\x89PNG\r\n\x00\x00" * 90,
        "zeros.bin": bytes(5000),
        "empty.txt": b"",
    }
    for name, content in (kept | passed_over).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    hidden = tmp_path / ".git" / "config"
    hidden.parent.mkdir()
    hidden.write_text("hidden")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")

    text = read(tmp_path)
    assert text.files == len(kept)
    assert text.skipped == len(passed_over) + 2  # the dangling link and the pipe
    whole = [first + rest for first, rest in zip(text.train, text.held_out, strict=True)]
    assert sorted(whole) == sorted(kept.values())


def test_a_named_binary_file_is_read_whole(tmp_path):
    content = bytes(range(256)) * 8
    (tmp_path / "all-bytes").write_bytes(content)
    text = read(tmp_path / "all-bytes")
    train, held_out, vocabulary = data.tokenize(text, None)
    assert vocabulary == 256
    assert bytes(np.concatenate([train.ids, held_out.ids]).tolist()) == content


def test_a_file_named_twice_counts_once(tmp_path):
    path = write_text(tmp_path / "a.txt")
    assert read(path, path, tmp_path).files == 1


def test_the_run_inside_its_text_folder_is_not_read(tmp_path):
    write_text(tmp_path / "a.txt")
    out = tmp_path / "out"
    before = read(tmp_path, out=out).fingerprint()
    out.mkdir()
    write_text(out / "metrics.jsonl")
    assert read(tmp_path, out=out).fingerprint() == before


def test_many_files_are_split_by_file_and_by_content_alone(tmp_path):
    for i in range(40):
        write_text(tmp_path / f"{i}.txt", lines=20 + i)
    text = read(tmp_path)
    assert len(text.train) + len(text.held_out) == 40
    assert not set(text.train) & set(text.held_out)
    total = sum(map(len, text.train + text.held_out))
    assert total / 20 <= sum(map(len, text.held_out)) <= total / 10
    for i in range(40):
        (tmp_path / f"{i}.txt").rename(tmp_path / f"renamed-{39 - i}.txt")
    assert sorted(read(tmp_path).held_out) == sorted(text.held_out)


def test_one_huge_file_among_many_is_not_held_out_whole(tmp_path):
    for i in range(40):
        write_text(tmp_path / f"{i}.txt", lines=2 + i % 3)
    write_text(tmp_path / "huge.txt", lines=20_000)
    text = read(tmp_path)
    total = sum(map(len, text.train + text.held_out))
    assert sum(map(len, text.held_out)) <= total / 9


@pytest.mark.parametrize("size", [2 * WINDOW, 2 * WINDOW + 1, 100, 5000])
def test_a_short_text_still_holds_out_a_window(tmp_path, size):
    (tmp_path / "a.txt").write_bytes(b"abc" * size)
    content = (tmp_path / "a.txt").read_bytes()[:size]
    (tmp_path / "a.txt").write_bytes(content)
    train, held_out, _ = data.tokenize(read(tmp_path / "a.txt"), None)
    data.check_length(train, held_out, WINDOW - 1)
    assert len(train.ids) + len(held_out.ids) == size
    assert len(held_out.ids) == max(WINDOW, -(-size // 20))


def test_the_standard_library_is_the_default():
    text = read()
    assert text.files > 300
    assert sum(map(len, text.train)) > 4_000_000
    assert any(b"import" in document for document in text.held_out)


def test_windows_overlap_by_one_token_and_cover_the_text():
    windows = data.Windows(np.arange(103, dtype=np.int32), 10)
    assert len(windows) == 10
    np.testing.assert_array_equal(windows[0], np.arange(11))
    np.testing.assert_array_equal(windows[9], np.arange(90, 101))


def test_batches_are_the_seeds_alone_and_continue_from_their_state():
    tokens = data.Tokens(np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint8), 1.0)

    def take(iterator, count):
        return [next(iterator) for _ in range(count)]

    # 187 windows, 46 batches an epoch: 60 batches cross its end.
    whole = take(data.training_batches(tokens, config(seed=3)), 60)
    again = data.training_batches(tokens, config(seed=3))
    np.testing.assert_array_equal(take(again, 25), whole[:25])
    state = again.get_state()
    continued = data.training_batches(tokens, config(seed=3))
    continued.set_state(state)
    np.testing.assert_array_equal(take(continued, 35), whole[25:])
    other = take(data.training_batches(tokens, config(seed=4)), 60)
    assert any((a != b).any() for a, b in zip(whole, other, strict=True))
    assert whole[0].shape == (4, WINDOW) and whole[0].dtype == np.int32


def test_an_epoch_shows_every_window_once():
    ids = np.arange(16 * 40 + 1, dtype=np.int32)  # 40 windows, 10 batches
    iterator = data.training_batches(data.Tokens(ids, 1.0), config())
    starts = np.concatenate([next(iterator)[:, 0] for _ in range(10)])
    np.testing.assert_array_equal(np.sort(starts), np.arange(40) * 16)


@pytest.mark.parametrize("windows", [1, 3, 4, 9, 500])
def test_held_out_batches_are_whole_spread_and_fixed(windows):
    ids = np.arange(16 * windows + 1, dtype=np.int32)
    batches = data.held_out_batches(data.Tokens(ids, 1.0), config(eval_windows=8))
    starts = np.concatenate([batch[:, 0] for batch in batches]) // 16
    assert len(batches) == (2 if windows >= 8 else 1)
    assert set(starts) <= set(range(windows))
    assert len(set(starts)) == min(windows, len(starts))


def test_a_tokenizer_file_keeps_losses_in_nats_a_byte(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    text_file = write_text(tmp_path / "a.txt")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    made.train([str(text_file)], trainer)
    made.save(str(tmp_path / "tokenizer.json"))

    text = read(text_file)
    train, held_out, vocabulary = data.tokenize(text, str(tmp_path / "tokenizer.json"))
    assert vocabulary == made.get_vocab_size()
    assert 1 < train.bytes_per_token < 20
    assert train.bytes_per_token * len(train.ids) == pytest.approx(sum(map(len, text.train)))
    assert held_out.bytes_per_token * len(held_out.ids) == pytest.approx(
        sum(map(len, text.held_out))
    )
    assert train.ids.max() < vocabulary


def test_an_unreadable_named_file_is_an_error(tmp_path):
    folder = tmp_path / "loop.txt"
    folder.symlink_to(folder)
    with pytest.raises(UserError, match="does not exist|cannot be read"):
        read(folder)
