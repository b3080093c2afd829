"""A run.json that was changed in the store: no machine acts on it, and no controller vouches for it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.security.vouched import Proof, UntrustedRun, read_signed_run, sign_run
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator import home as trust
from grpo_orch.orchestrator.control import daemon
from grpo_orch.orchestrator.control.launcher import start_daemon
from grpo_orch.orchestrator.home import run_digest_file, run_id_of, run_token, saved_run_digest, token_mark
from grpo_orch.policies.model import exit_codes
from tests.stand_ins.world import spec

names = itertools.count()
SECRET = "the-run's-secret"


def record(store: Store, **changed: Any) -> RunRecord:
    run = spec()
    run = replace(run, trainer=replace(run.trainer, **changed), rollout=replace(run.rollout, **changed))
    return RunRecord(documents.SCHEMA, run_id_of("sim", store.url), 0.0, run)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path / "home"))
    store = Store(f"file://{tmp_path}/store")
    documents.create_run(store, record(store))
    return store


def test_signed_record_is_read(store: Store) -> None:
    sign_run(store, SECRET)
    assert read_signed_run(store, SECRET) == record(store)


@pytest.mark.parametrize("what", ["changed", "another secret", "no proof", "another's proof", "not ascii"])
def test_unsigned_record_is_refused(store: Store, what: str) -> None:
    sign_run(store, "other" if what == "another secret" else SECRET)
    if what == "changed":
        store.put(layout.RUN, store.get(layout.RUN).replace(b'"name":"sim"', b'"name":"Sim"'))
    elif what == "no proof":
        store.delete([layout.PROOF])
    elif what == "another's proof":
        sign_run(store, SECRET, b"{}")
    elif what == "not ascii":
        store.put(layout.PROOF, to_json(Proof("é" * 64)))
    with pytest.raises(UntrustedRun, match=layout.RUN):
        read_signed_run(store, SECRET)


@pytest.mark.parametrize(
    "module",
    [
        "grpo_orch.tasks.machine.trainer_machine",
        "grpo_orch.tasks.trainer.main",
        "grpo_orch.tasks.rollout.agent",
        "grpo_orch.tasks.machine.uploader",
    ],
)
def test_changed_run_json_stops_node_before_use(store: Store, tmp_path: Path, module: str) -> None:
    sign_run(store, SECRET)
    store.put(layout.RUN, to_json(record(store, setup=f"touch {tmp_path}/done")))
    node = {
        "GRPO_ORCH_RUN": store.url,
        "GRPO_ORCH_NODE": "trainer-0-i1",
        "GRPO_ORCH_TOKEN": SECRET,
        "GRPO_ORCH_ATTEMPT": "1",
        "GRPO_ORCH_WORKDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", module], env={**os.environ, **node}, capture_output=True, text=True
    )
    assert done.returncode == exit_codes.BAD_SPEC
    assert [
        line for line in done.stderr.splitlines() if "run.json was changed after the run was started" in line
    ] == (done.stderr.splitlines()), "one line"
    assert not (tmp_path / "done").exists()


def test_a_controller_vouches_for_the_run_that_it_knows(store: Store) -> None:
    stop = threading.Event()
    stop.set()
    assert daemon.control_run(store, "up", stop) == exit_codes.OK
    token = run_token(record(store).run_id)
    assert read_signed_run(store, token) == record(store)
    assert saved_run_digest(store.url) == trust.run_digest(store.get(layout.RUN))


@pytest.mark.parametrize("with_proof", [True, False], ids=["proof left", "proof removed"])
def test_a_controller_does_not_take_a_run_that_was_changed(store: Store, with_proof: bool) -> None:
    stop = threading.Event()
    stop.set()
    daemon.control_run(store, "up", stop)
    entries = store.entries(layout.JOURNAL)
    store.put(layout.RUN, to_json(replace(record(store), created_at_s=time.time(), run_id="another")))
    if not with_proof:
        store.delete([layout.PROOF, layout.SECRET])
    starts: tuple[Callable[[], object], ...] = (
        lambda: daemon.control_run(store, "resume", stop),
        lambda: start_daemon(store, record(store), "resume"),
    )
    for start in starts:
        with pytest.raises(UntrustedRun, match=str(run_digest_file(store.url))):
            start()
    assert store.entries(layout.JOURNAL) == entries


def test_machine_with_only_the_secret_verifies_by_proof(store: Store) -> None:
    """The token file was brought along, as `resume` asks for while machines are up."""
    token = run_token(record(store).run_id)
    documents.SECRET_MARK.write(store, token_mark(token))
    trust.known_run(store)  # of a version that did not vouch
    sign_run(store, token)
    trust.known_run(store)
    store.put(layout.RUN, to_json(replace(record(store), created_at_s=time.time())))
    with pytest.raises(UntrustedRun):
        trust.known_run(store)


def test_controller_machine_knows_run_from_its_launcher(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.DIGEST_ENV, trust.run_digest(store.get(layout.RUN)))
    trust.known_run(store)
    store.put(layout.RUN, to_json(replace(record(store), created_at_s=time.time())))
    with pytest.raises(UntrustedRun):
        trust.known_run(store)
