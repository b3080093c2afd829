"""The processes on one machine read a checkpoint from the store once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.security.vouched import sign_run
from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV, Store
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.checkpoint.stream.manifest import files_below
from grpo_orch.checkpoint.stream.transfer import upload
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.machine.children import start_child
from grpo_orch.tasks.machine.launching import trainer_argv
from grpo_orch.tasks.machine.node_env import NodeEnv
from tests.budget import HANG_S
from tests.node.trainer.rig import run_spec
from tests.node.trainer.stand_in_gateway import TOKEN
from tests.rigs.narrow_link import narrow_link
from tests.rigs.store.server import S3Server

WEIGHTS_BYTES = 64 * 2**20
UNLIMITED = 1e15  # bytes a second: the link is here to count


def test_three_processes_read_a_checkpoint_once(moto: S3Server, tmp_path: Path) -> None:
    """The last one, after which nothing is left to train: all that a trainer reads is what it restores."""
    store = Store(moto.url("ranks"), options=moto.options())
    spec = run_spec(store.url, tmp_path, grpo={"max_steps": 6}, model="none", accelerators="H100:3")
    documents.create_run(store, RunRecord(documents.SCHEMA, "id", time.time(), spec))
    sign_run(store, TOKEN)
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "model.safetensors").write_bytes(os.urandom(WEIGHTS_BYTES))
    (saved / "trainer_state.json").write_text(json.dumps({"global_step": 6, "max_steps": 6}))
    upload(store, Catalog(store, "test"), files_below(saved), PolicyVersion(0, 6), time.time(), {})
    env = NodeEnv(store.url, "trainer-0-i1", TOKEN, 1, 0, str(tmp_path), "127.0.0.1")
    with narrow_link(int(moto.endpoint.rpartition(":")[2]), UNLIMITED) as link:
        told = {
            "GRPO_ORCH_RUN": env.run,
            "GRPO_ORCH_NODE": env.node,
            "GRPO_ORCH_TOKEN": env.token,
            "GRPO_ORCH_ATTEMPT": "1",
            "GRPO_ORCH_WORKDIR": env.workdir,
            OPTIONS_ENV: json.dumps(moto.at(link.endpoint).options()),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        launcher = start_child(trainer_argv(env, spec), {**os.environ, **told})
        try:
            assert launcher.wait(HANG_S) == exit_codes.OK
        finally:
            launcher.kill()
        ratio = link.passed_bytes / WEIGHTS_BYTES
    print(f"three processes read {ratio:.3f} times the checkpoint")
    restored = tmp_path / "restored" / "checkpoint-6" / "model.safetensors"
    assert restored.read_bytes() == (saved / "model.safetensors").read_bytes()
    assert 1 <= ratio < 1.05
