"""The baseline: TRL's GRPOTrainer in server mode with one vLLM server and nothing in between.

Run by `benchmarks/main.py` with the nodes' Python: `direct_trl.py FOLDER GRPO OUT.json`, where FOLDER is made by
`examples/tiny/make_model.py` and GRPO is JSON that changes the example's `grpo`. TRL's own client is used, but
for the transfer of weights: TRL broadcasts them over NCCL, which needs CUDA, so here they go through a file on
tmpfs that vLLM's own `reload_weights` reads back, the fastest way there is on a CPU. Writes the wall-clock time
at the end of each step.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import torch
import yaml
from datasets import load_dataset
from safetensors.torch import save_file
from transformers import TrainerCallback

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "tiny"))

import rewards  # type: ignore[import-not-found]  # noqa: E402  # of the tiny example, on the path since just now
import trl.generation.vllm_client as client_module  # noqa: E402
import trl.generation.vllm_generation as generation_module  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

START_TIMEOUT_S = 120.0


def start_server(
    model: Path, flags: dict[str, Any], env: dict[str, str], log: Path
) -> tuple[subprocess.Popen[bytes], str]:
    """Start one vLLM with the flags of the example's run.yaml; return it and its URL once it is healthy."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--logprobs-mode", "processed_logprobs"]
    for name, value in flags.items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    environment = {**os.environ, **{name: str(value) for name, value in env.items()}, "VLLM_SERVER_DEV_MODE": "1"}
    process = subprocess.Popen(argv, env=environment, stdout=log.open("wb"), stderr=subprocess.STDOUT)
    url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            requests.get(f"{url}/health", timeout=1).raise_for_status()
        except requests.RequestException:
            time.sleep(0.2)
        else:
            return process, url
    raise SystemExit(f"vLLM did not start; its log is {log}")


class FileClient(client_module.VLLMClient):
    """TRL's client with files in the place of NCCL."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        client_module.is_vllm_available = lambda *_: True  # the CPU build has another distribution name
        super().__init__(*args, **kwargs)
        self._folder = tempfile.mkdtemp(dir="/dev/shm")

    def init_communicator(self, *_: Any, **__: Any) -> None: ...

    def close_communicator(self) -> None: ...

    def update_named_params(self, _: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        save_file(
            {name: tensor.contiguous() for name, tensor in named_params}, f"{self._folder}/model.safetensors"
        )
        body = {"method": "reload_weights", "kwargs": {"weights_path": self._folder}}
        self._post_empty(f"{self.base_url}/collective_rpc", body)

    def reset_prefix_cache(self) -> None:
        self._post_empty(f"{self.base_url}/reset_prefix_cache", None)

    def _post_empty(self, url: str, body: Any) -> None:
        self.session.post(url, json=body).raise_for_status()


class Clock(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.rewards: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times_s.append(time.time())

    def on_log(self, _: Any, state: Any, control: Any, logs: dict[str, float], **__: Any) -> None:  # noqa: ARG002
        if "reward" in logs:
            self.rewards.append(logs["reward"])


def main() -> None:
    folder, changes, out = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    spec = yaml.safe_load((ROOT / "examples" / "tiny" / "run.yaml").read_text())
    grpo = {**spec["grpo"], **changes}
    grpo["learning_rate"] = float(grpo["learning_rate"])  # YAML 1.1 reads 3e-3 as a text
    for ours in ("eval_strategy", "eval_steps", "save_steps"):
        grpo.pop(ours, None)
    server, url = start_server(
        folder / "model", spec["rollout"]["vllm"], spec["rollout"]["env"], out.with_suffix(".log")
    )
    try:
        generation_module.is_vllm_available = lambda *_: True
        generation_module.VLLMClient = FileClient
        torch.set_num_threads(1)
        config = GRPOConfig(
            **{
                **grpo,
                "use_vllm": True,
                "vllm_mode": "server",
                "vllm_server_base_url": url,
                "output_dir": str(out.parent / "trl"),
                "save_strategy": "no",
                "logging_steps": 1,
                "report_to": "none",
                "disable_tqdm": True,
            }
        )
        clock = Clock()
        trainer = GRPOTrainer(
            model=str(folder / "model"),
            args=config,
            reward_funcs=[rewards.digit_share],
            train_dataset=load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train"),
            callbacks=[clock],
        )
        trainer.train()
        out.write_text(json.dumps({"times_s": clock.times_s, "rewards": clock.rewards}))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
