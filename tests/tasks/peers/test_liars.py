"""Peers that lie, stall, vanish or are somebody else's: they cost time, and the content is the published one."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkpoint.store.errors import NotFound, StoreUnavailable
from checkpoint.stream import manifest
from checkpoint.stream.chunks import TRANSFERS
from tasks.peers import download, peer, server
from tasks.peers.download import PeerDownload
from tasks.peers.peers import Peers
from tests.budget import HANG_S, until
from tests.stand_ins.catalog_rig import CHUNK
from tests.stand_ins.strangers import check_closed
from tests.tasks.peers import liar as lies
from tests.tasks.peers.liar import Answer, liar
from tests.tasks.peers.rig import CHUNKS, PREFIX, TOKEN, Rig, introduce, nodes

LOCAL, SECURED = "127.0.0.1", "0.0.0.0"


class Impatient:
    """A node that soon gives a peer up, once it has met it: what has hardly begun may be slow to say that it is
    there."""

    def __init__(self, peers: Peers, patch: pytest.MonkeyPatch) -> None:
        self._peers, self._patch = peers, patch

    @contextmanager
    def download(self, root: str, names: Sequence[str], folders: Sequence[Path]) -> Iterator[PeerDownload]:
        with self._peers.download(root, names, folders) as one:
            self._patch.setattr(peer, "SILENT_S", 0.3)
            self._patch.setattr(peer, "HOLD_S", 0.3)
            self._patch.setattr(server, "HOLD_S", 0.1)
            self._patch.setattr(download, "PATIENCE_S", (0.3, 0.3))
            yield one


@pytest.fixture(params=[LOCAL, SECURED])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(tmp_path, request.param)


@pytest.mark.parametrize(
    "answer",
    [
        lies.garbage,
        lies.half,
        lies.too_little,
        lies.stalls,
        lies.drips,
        lies.silent,
        lies.promises,
        lies.refuses,
        lies.has_nothing,
        lies.no_http,
    ],
)
def test_a_peer_that_lies_costs_time_and_is_soon_left_alone(
    rig: Rig, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sorted(rig.policy.chunks)
    with nodes(1, rig.host) as found, liar(rig.host, names, CHUNK, answer, TOKEN) as other:
        for greeted in found[0].know([found[0].address, other.address]):
            greeted.result(HANG_S)
        rig.fetch(0, Impatient(found[0], monkeypatch))
        assert len(rig.store.read) == CHUNKS
        until("it was asked", lambda: other.asked)
        if answer is not lies.has_nothing and answer is not lies.promises:
            assert other.asked <= 2 * TRANSFERS


def test_a_peer_with_the_identity_of_another_run_is_told_nothing_and_given_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SECURED)
    names = sorted(rig.policy.chunks)
    with nodes(1, SECURED) as found, liar(SECURED, names, CHUNK, lies.garbage, f"{TOKEN}, nearly") as other:
        introduce(found, other.address)
        rig.fetch(0, found[0])
        assert other.asked == 0
        with Peers(SECURED, f"{TOKEN}, nearly") as stranger:
            stranger.know([found[0].address])
            rig.store.read.clear()
            rig.fetch(1, stranger)
        assert len(rig.store.read) == CHUNKS
        check_closed(SECURED, int(found[0].address.rpartition(":")[2]), TOKEN)


def test_one_that_is_gone_or_never_was_there_is_remembered(rig: Rig) -> None:
    with socket.socket() as sock:
        sock.bind((rig.host, 0))
        gone = f"{rig.host}:{sock.getsockname()[1]}"
    with nodes(2, rig.host) as found:
        introduce(found, gone, "not an address", "256.0.0.1:70000")
        rig.fetch_together(found)
    assert rig.read == sorted(rig.policy.chunks)


def test_a_peer_that_starts_again_elsewhere_is_asked_there(rig: Rig) -> None:
    with nodes(1, rig.host) as found:
        with Peers(rig.host, TOKEN) as first:
            introduce([*found, first])
            rig.fetch_together([*found, first])
        rig.store.read.clear()
        with Peers(rig.host, TOKEN) as again:
            introduce([*found, again])
            rig.fetch(2, again)
    assert rig.store.read == []


def test_with_the_store_away_a_node_gets_all_from_those_who_have_it(rig: Rig) -> None:
    with nodes(3, rig.host) as found:
        rig.fetch_together(found[:2])
        for error in (StoreUnavailable("the store is away"), NotFound("it was removed")):
            rig.store.error = error
            rig.fetch(2, found[2])
            (rig.folder / "node-2" / "policy" / "model.safetensors").unlink()


def test_what_nobody_has_is_the_stores_error(rig: Rig) -> None:
    rig.store.error = StoreUnavailable("the store is away")
    with nodes(2, rig.host) as found, pytest.raises(StoreUnavailable):
        rig.fetch_together(found)


def test_files_that_were_overwritten_or_deleted_are_not_given_away(rig: Rig) -> None:
    with nodes(2, rig.host) as found:
        rig.fetch(0, found[0])
        model = rig.folder / "node-0" / "policy" / "model.safetensors"
        changed = bytearray(model.read_bytes())
        changed[: CHUNK * CHUNKS // 2] = bytes(CHUNK * CHUNKS // 2)
        model.write_bytes(changed)
        rig.store.read.clear()
        rig.fetch(1, found[1])
        assert len(rig.store.read) == CHUNKS // 2
        model.unlink()
        rig.fetch(2, found[0])


def test_a_download_that_nobody_wants_any_more_ends_while_it_waits_for_a_peer(tmp_path: Path) -> None:
    rig = Rig(tmp_path, LOCAL)
    waits = threading.Event()

    class NoMore(Exception):
        pass

    def progress(size_bytes: int) -> None:
        if size_bytes == 0 and other.asked:
            waits.set()
            raise NoMore

    names = sorted(rig.policy.chunks)
    with nodes(1, LOCAL) as found, liar(LOCAL, names, CHUNK, lies.promises, TOKEN) as other:
        introduce(found, other.address)
        with pytest.raises(NoMore):
            manifest.materialize(rig.store, PREFIX, rig.policy.files, tmp_path / "to", progress, found[0])
    assert waits.is_set()


def test_with_the_store_away_a_download_that_nobody_wants_any_more_asks_nobody_else(tmp_path: Path) -> None:
    rig = Rig(tmp_path, LOCAL)
    names = sorted(rig.policy.chunks)

    class NoMore(Exception):
        pass

    def still() -> None:
        if other.asked or another.asked:
            raise NoMore

    with (
        nodes(1, LOCAL) as found,
        liar(LOCAL, names, CHUNK, lies.promises, TOKEN) as other,
        liar(LOCAL, names, CHUNK, lies.promises, TOKEN) as another,
    ):
        introduce(found, other.address, another.address)
        with found[0].download(PREFIX, names, [tmp_path]) as one, pytest.raises(NoMore):
            one.get_at_once(names[0], CHUNK, still, lambda: None)
    assert (other.asked, another.asked) in ((1, 0), (0, 1))


# Fetches all chunks but one, which it promises and never gets.
VICTIM = """
import sys
from checkpoint.stream import chunks
from tasks.peers.peers import Peers
from pathlib import Path
chunks.CHUNK_BYTES = {chunk}
with Peers("{host}", "{token}") as peers:
    print(peers.address, flush=True)
    with peers.download("{prefix}", {names}, [Path("{folder}")]):
        sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_killed_or_stops_in_the_middle_is_replaced(
    rig: Rig, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if number == signal.SIGSTOP:
        monkeypatch.setattr(peer, "CONNECT_S", 1.0)  # it accepts, and does not shake hands
        monkeypatch.setattr(peer, "SILENT_S", 1.0)
    names = sorted(rig.policy.chunks)
    program = VICTIM.format(chunk=CHUNK, host=rig.host, token=TOKEN, prefix=PREFIX, names=names, folder=rig.folder)
    victim = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert victim.stdout is not None
        address = victim.stdout.readline().strip()
        with nodes(3, rig.host) as found:
            introduce(found, address)
            rig.fetch_together(found, lambda: victim.send_signal(number))
    finally:
        victim.kill()
        victim.wait()
    if number == signal.SIGKILL:
        assert rig.read == sorted(rig.policy.chunks)
    else:  # who is well may pass for silent, too
        assert set(rig.read) == rig.policy.chunks
