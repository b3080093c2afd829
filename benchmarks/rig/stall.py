"""What a checkpoint costs a trainer: `python -m benchmarks.rig.stall FOLDER`, in the nodes' environment.

A model of 125 million weights in fp32 with AdamW's state, 1.5 GB together, trains on this machine's processor. In
turns a checkpoint is saved as usual and uploaded while the trainer waits, or spooled and left to the uploader's
process. Prints the stalls, and the times of steps with and without an upload beside them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.rig.weights.transfer import peak_rss_mib
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.security.vouched import sign_run
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.checkpoint.stream.spool import Seal, Spool
from grpo_orch.policies.model.spec import Dataset, RunSpec, TrainerSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.machine.children import start_child
from grpo_orch.tasks.machine.node_env import read_node_env
from grpo_orch.tasks.machine.spooling import make_spool, remove_spool
from grpo_orch.tasks.trl import fast_save

WIDTH, LAYERS, BATCH = 2048, 30, 96
ROUNDS, CALM_STEPS = 3, 6
UPLOAD_TIMEOUT_S = 120.0


class Work:
    """The model, its optimizer, and a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._batch = torch.randn(BATCH, WIDTH)

    def step(self) -> float:
        """Train one step. Returns its seconds."""
        begun_s = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - begun_s

    @property
    def sizes(self) -> dict[str, int]:
        weights_bytes = sum(weight.nbytes for weight in self.model.parameters())
        return {"model.safetensors": weights_bytes, "optimizer.pt": 2 * weights_bytes}


def save_then_upload(work: Work, store: Store, folder: Path, step: int) -> float:
    """The usual way: files into memory, then into the store. Returns the trainer's stall."""
    begun_s = time.perf_counter()
    slot = folder / f"checkpoint-{step}"
    slot.mkdir()
    save_file(work.model.state_dict(), slot / "model.safetensors", metadata={"format": "pt"})
    torch.save(work.optimizer.state_dict(), slot / "optimizer.pt")
    version = PolicyVersion(0, step)
    manifest.publish(store, layout.policy(version, (0, 1, 1)), slot, version, time.time())
    shutil.rmtree(slot)
    return time.perf_counter() - begun_s


def save_to_spool(work: Work, spool: Spool, step: int) -> float:
    """Our way, with the trainer's own code. Returns the trainer's stall."""
    begun_s = time.perf_counter()
    slot = spool.claim(step)
    if slot is None:
        raise SystemExit("the spool has no room")
    with fast_save.overwriting():
        fast_save.save_tensors(work.model.state_dict(), slot / "model.safetensors", {"format": "pt"})
        torch.save(work.optimizer.state_dict(), str(slot / "optimizer.pt"))
    spool.seal(slot, Seal(str(PolicyVersion(0, step)), time.time()))
    return time.perf_counter() - begun_s


def steps_until_stored(work: Work, spool: Spool) -> tuple[list[float], float]:
    """Train until the uploader is done. Returns the steps' seconds and the upload's."""
    begun_s, times_s = time.perf_counter(), []
    while spool.sealed():
        times_s.append(work.step())
        if time.perf_counter() - begun_s > UPLOAD_TIMEOUT_S:
            raise SystemExit(f"the upload does not end: {spool.reported()}")
    return times_s, time.perf_counter() - begun_s


def main() -> None:
    folder = Path(sys.argv[1])
    env = read_node_env()
    store = Store(env.run)
    trainer = TrainerSpec(model="none", dataset=Dataset(path="none"), reward_funcs=())
    spec = RunSpec(name="stall", storage=env.run, trainer=trainer, grpo={})
    documents.create_run(store, RunRecord(documents.SCHEMA, "stall", time.time(), spec))
    sign_run(store, env.token)
    work = Work()
    spool = make_spool(Path(env.workdir), spec.checkpoints, sum(work.sizes.values()))
    uploader = start_child([sys.executable, "-m", "grpo_orch.tasks.machine.uploader"], dict(os.environ))
    result: dict[str, Any] = {"usual_s": [], "ours_s": [], "calm_s": [], "beside_s": [], "upload_s": []}
    try:
        for _ in range(3):
            work.step()
        for round_number in range(ROUNDS):
            result["usual_s"].append(save_then_upload(work, store, folder, 2 * round_number + 1))
            result["calm_s"] += [work.step() for _ in range(CALM_STEPS)]
            result["ours_s"].append(save_to_spool(work, spool, 2 * round_number + 2))
            beside_s, upload_s = steps_until_stored(work, spool)
            result["beside_s"] += beside_s
            result["upload_s"].append(upload_s)
            result["calm_s"] += [work.step() for _ in range(CALM_STEPS)]
        result["uploader_rss_mib"] = peak_rss_mib(uploader.pid)
    finally:
        uploader.kill()
        uploader.wait()
        remove_spool(Path(env.workdir))
    result["state_bytes"] = sum(work.sizes.values())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
