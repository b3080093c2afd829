"""Whatever weights become, a delta makes of the ones the others, bit for bit; and a damaged one nothing at all."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.weights import delta, safetensors, scratch
from grpo_orch.checkpoint.weights.delta import DeltaWriter
from tests.checkpoint.weights.files import (
    ITEM_BYTES,
    POOL,
    Weights,
    bytes_of,
    content,
    digest_of,
    rewrite,
)

# Quiet and signalling NaNs with payloads, both zeros, the smallest denormals, infinities: as words of 4 bytes.
AWKWARD = [0x7FC00000, 0x7F800001, 0xFFC12345, 0x80000000, 0, 1, 0x80000001, 0x007FFFFF, 0x7F800000, 0xFFFFFFFF]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors have several, the last one cut; and a delta is kept whatever its size."""
    monkeypatch.setattr(safetensors, "PIECE_BYTES", 64)
    monkeypatch.setattr(scratch, "PAYS_BELOW", float("inf"))


@st.composite
def changes(draw: st.DrawFn) -> tuple[Weights, Weights]:
    """Two versions of the same tensors, any share of the second's words replaced."""
    before, after = Weights(), Weights()
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        elements = draw(st.sampled_from([0, 1, 2, 3, 7, 33, 300]))
        size = elements * ITEM_BYTES[dtype]
        old = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
        words = np.resize(np.array(AWKWARD, "<u4").view(np.uint8), size)
        new, share = old.copy(), draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
        hit = np.repeat(np.random.default_rng(number).random(elements) < share, ITEM_BYTES[dtype])
        new[hit] = (words if draw(st.booleans()) else ~old)[hit]
        before[f"t{number}"], after[f"t{number}"] = (dtype, old.tobytes()), (dtype, new.tobytes())
    return before, after


@settings(max_examples=300, deadline=None)
@given(changes())
def test_a_delta_makes_the_next_weights_to_the_bit_and_may_be_applied_again(
    versions: tuple[Weights, Weights],
) -> None:
    before, after = versions
    with TemporaryDirectory() as folder:
        ours, theirs, changed = (Path(folder) / name for name in ("ours", "theirs", "delta.bin"))
        first = rewrite(ours, before, "", changed)
        assert not changed.exists()
        assert content(ours) == bytes_of(before)
        shutil.copy(ours, theirs)
        second = rewrite(ours, after, first.digest, changed)
        assert content(ours) == bytes_of(after)
        assert second.delta_bytes == changed.stat().st_size
        assert (first.digest == second.digest) == (before == after)
        for _ in range(2):
            assert delta.apply([changed], theirs, first.digest, POOL) == second.digest == digest_of(theirs)
            assert content(theirs) == bytes_of(after)


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.5, 1.0])
def test_a_piece_comes_back_whatever_share_of_it_has_changed(item_bytes: int, share: float) -> None:
    draw = np.random.default_rng(3)
    old = draw.integers(0, 256, 40_000 + 3 * item_bytes, np.uint8)
    new = np.where(np.repeat(draw.random(len(old) // item_bytes) < share, item_bytes), ~old, old)
    data = delta.encode_piece(old, new, item_bytes)
    assert bool(data) == bool(share)
    piece = old.copy()
    if data:
        delta.decode_piece(memoryview(data), piece, item_bytes)
    assert piece.tobytes() == new.tobytes()


def test_one_percent_of_bfloat16_takes_an_eightieth() -> None:
    draw = np.random.default_rng(5)
    old = (draw.normal(0, 0.02, 2_000_000).astype("<f4").view("<u4") >> 16).astype("<u2")
    new = old ^ (draw.random(len(old)) < 0.01)
    assert (
        len(delta.encode_piece(old.view(np.uint8), new.astype("<u2").view(np.uint8), 2)) < old.nbytes / 80 * 1.02
    )


def test_the_digest_names_the_content_wherever_it_is(tmp_path: Path) -> None:
    weights: Weights = {"b": ("BF16", b"12"), "a": ("F32", b"1234"), "c": ("BF16", b"")}
    first = rewrite(tmp_path / "1", weights, "", tmp_path / "d")
    again = rewrite(tmp_path / "2", dict(reversed(weights.items())), "", tmp_path / "d")
    assert first.digest == again.digest == digest_of(tmp_path / "2")
    others: list[Weights] = [
        {**weights, "b": ("F16", b"12")},
        {**weights, "b": ("BF16", b"13")},
        {**weights, "d": ("BF16", b"")},
        {"a": ("BF16", b"12"), "b": ("F32", b"1234"), "c": ("BF16", b"")},
    ]
    digests = {rewrite(tmp_path / "3", other, "", tmp_path / "d").digest for other in others}
    assert len(digests | {first.digest}) == 5


def test_many_deltas_are_one_pass_over_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(2)
    now = draw.integers(0, 256, 6400, np.uint8)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    first = last = rewrite(ours, {"t": ("BF16", now.tobytes())}, "", tmp_path / "0")
    shutil.copy(ours, theirs)
    for number in range(1, 9):
        now[draw.random(6400) < 0.1] += 1
        last = rewrite(ours, {"t": ("BF16", now.tobytes())}, last.digest, tmp_path / str(number))
    writes, write = list[int](), safetensors.write

    def counted(file: int, at: int, piece: safetensors.Bytes) -> None:
        writes.append(at)
        write(file, at, piece)

    monkeypatch.setattr(safetensors, "write", counted)
    deltas = [tmp_path / str(number) for number in range(1, 9)]
    assert delta.apply(deltas, theirs, first.digest, POOL) == last.digest == digest_of(theirs)
    assert len(writes) == len(set(writes)) == 100
    held = theirs.read_bytes()
    with pytest.raises(Corrupt, match="is for weights"):
        delta.apply([deltas[0], deltas[2]], theirs, first.digest, POOL)
    assert theirs.read_bytes() == held


def made(folder: Path) -> tuple[Path, Path, str]:
    """A weights file, a delta to it, and the digest before."""
    draw = np.random.default_rng(1)
    before = {f"t{n}": ("BF16", draw.integers(0, 256, 150, np.uint8).tobytes()) for n in range(3)}
    after = {name: (dtype, data[:40] + b"xx" + data[42:]) for name, (dtype, data) in before.items()}
    base, weights, changed = folder / "base", folder / "weights", folder / "delta.bin"
    first = rewrite(weights, before, "", changed)
    shutil.copy(weights, base)
    rewrite(weights, after, first.digest, changed)
    return base, changed, first.digest


def damages(whole: bytes) -> Iterator[bytes]:
    yield from (whole[:size] for size in range(len(whole)))
    yield whole + b"x"
    for at in range(len(whole)):
        yield whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :]


def test_a_damaged_delta_changes_nothing(tmp_path: Path) -> None:
    weights, changed, base = made(tmp_path)
    before, whole = weights.read_bytes(), changed.read_bytes()
    for damaged in damages(whole):
        changed.write_bytes(damaged)
        with pytest.raises(Corrupt):
            delta.apply([changed], weights, base, POOL)
        assert weights.read_bytes() == before


def test_a_damaged_piece_is_refused_where_its_digest_was_made_of_the_damage() -> None:
    old = np.arange(64, dtype=np.uint8)
    new = np.where(np.arange(64) % 9 == 0, 255, old).astype(np.uint8)
    whole = delta.encode_piece(old, new, 2)
    for damaged in damages(whole):
        piece = old.copy()
        try:
            delta.decode_piece(memoryview(damaged), piece, 2)
        except Corrupt:
            assert piece.tobytes() == old.tobytes()


def test_a_piece_whose_long_gaps_are_not_all_there_is_refused() -> None:
    old, new = np.zeros(1200, np.uint8), np.zeros(1200, np.uint8)
    new[[300, 900]] = 1  # two long gaps
    lacking = np.zeros(1200, np.uint8)
    lacking[[300, 310]] = 1
    data, other = delta.encode_piece(old, new, 1), delta.encode_piece(old, lacking, 1)
    head, sizes, others = 20, struct.unpack("<5I", data[:20]), struct.unpack("<5I", other[:20])
    one_long = other[head + others[2] :][: others[3]]
    begun, rest = data[head:][: sizes[2]], data[head + sizes[2] + sizes[3] :]
    damaged = struct.pack("<5I", 2, 1, sizes[2], others[3], sizes[4]) + begun + one_long + rest
    with pytest.raises(Corrupt, match="lacks gaps"):
        delta.decode_piece(memoryview(damaged), old, 1)


def test_a_delta_is_for_its_base_and_its_tensors_alone(tmp_path: Path) -> None:
    weights, changed, base = made(tmp_path)
    before = weights.read_bytes()
    with pytest.raises(Corrupt, match=f"for weights {base}, not 0000"):
        delta.apply([changed], weights, "0000", POOL)
    others: list[Weights] = [
        {"t0": ("BF16", bytes(150)), "t1": ("BF16", bytes(150))},
        {f"t{n}": ("F16", bytes(150)) for n in range(3)},
        {f"t{n}": ("BF16", bytes(300)) for n in range(3)},
    ]
    for other in others:
        rewrite(tmp_path / "other", other, "", tmp_path / "none")
        held = (tmp_path / "other").read_bytes()
        with pytest.raises(Corrupt, match="which the weights lack"):
            delta.apply([changed], tmp_path / "other", base, POOL)
        assert (tmp_path / "other").read_bytes() == held
    assert weights.read_bytes() == before


def test_other_tensors_are_written_whole(tmp_path: Path) -> None:
    first = rewrite(tmp_path / "w", {"a": ("F32", bytes(400))}, "", tmp_path / "d")
    grown: Weights = {"a": ("F32", bytes(404))}
    assert rewrite(tmp_path / "w", grown, first.digest, tmp_path / "d").delta_bytes is None
    assert content(tmp_path / "w") == bytes_of(grown)
    assert not (tmp_path / "d").exists()


def test_a_delta_that_does_not_pay_is_given_up_and_the_weights_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "PAYS_BELOW", 0.5)
    monkeypatch.setattr(scratch, "AHEAD_BYTES", 100)
    draw = np.random.default_rng(1)
    before: Weights = {f"t{n:02d}": ("F32", draw.bytes(4000)) for n in range(20)}
    after: Weights = {f"t{n:02d}": ("F32", draw.bytes(4000)) for n in range(20)}
    first = rewrite(tmp_path / "w", before, "", tmp_path / "d")
    compared, encode = list[int](), delta.encode_piece

    def counted(*piece: Any) -> bytes:
        compared.append(1)
        return encode(*piece)

    monkeypatch.setattr(delta, "encode_piece", counted)
    second = rewrite(tmp_path / "w", after, first.digest, tmp_path / "d")
    assert second.delta_bytes is None
    assert len(compared) < 4000 / 64 * 20 / 3, "once it does not pay no more is compared"
    assert not (tmp_path / "d").exists()
    assert content(tmp_path / "w") == bytes_of(after)
    assert second.digest == digest_of(tmp_path / "w")


def test_a_write_that_fails_leaves_no_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before: Weights = {f"t{n:02d}": ("F32", bytes(4000)) for n in range(20)}
    first = rewrite(tmp_path / "w", before, "", tmp_path / "d")
    calls = iter(range(1000))

    def full(file: int, at: int, piece: safetensors.Bytes) -> None:
        if next(calls) > 30:
            raise OSError(28, "No space left on device")
        written(file, at, piece)

    written = safetensors.write
    monkeypatch.setattr(safetensors, "write", full)
    after: Weights = {name: ("F32", bytes([1]) * 4000) for name in before}
    with pytest.raises(OSError, match="No space"):
        rewrite(tmp_path / "w", after, first.digest, tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("writes", [3, 9, 10], ids=["a tensor", "the index", "the digest"])
def test_no_room_for_a_delta_is_no_reason_not_to_write_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    before: Weights = {f"t{n}": ("F32", bytes(400)) for n in range(8)}
    after: Weights = {name: ("F32", bytes([1]) * 400) for name in before}
    first = rewrite(tmp_path / "w", before, "", tmp_path / "d")
    calls, add = iter(range(1000)), DeltaWriter._add

    def full(writer: DeltaWriter, data: bytes) -> None:
        if next(calls) >= writes:
            raise OSError(28, "No space left on device")
        add(writer, data)

    monkeypatch.setattr(DeltaWriter, "_add", full)
    second = rewrite(tmp_path / "w", after, first.digest, tmp_path / "d")
    assert (second.delta_bytes, second.digest) == (None, digest_of(tmp_path / "w"))
    assert content(tmp_path / "w") == bytes_of(after)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("bad", [b"", b"\xff" * 8, b"\2\0\0\0\0\0\0\0{}{}", b'\x0a\0\0\0\0\0\0\0{"a": 123}'])
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "w").write_bytes(bad)
    if bad[8:10] == b"{}":
        assert safetensors.layout_of(tmp_path / "w") == {}
        return
    with pytest.raises(Corrupt, match="w is not a safetensors file"):
        safetensors.layout_of(tmp_path / "w")
