"""Stands in for a GPU's linear layers: vLLM's build for CPUs packs matrices away, for oneDNN, and with AMX for
kernels of its own, and is kept from both here, so that they are computed from the parameters themselves. Workers
import this before they load the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_orch.tasks.rollout.vllm import worker as vllm_worker


class Extension(vllm_worker.Extension):
    """As on a GPU; with each proof it writes vLLM's own checksums of its parameters beside the file."""

    def find_difference(self: Any, path: str, first: int, step: int) -> str:
        found = self.compute_weight_checksums()
        Path(f"{path}.{self.rank}").write_text(json.dumps(found))
        return vllm_worker.Extension.find_difference(self, path, first, step)


def _keep_plain() -> None:
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False


_keep_plain()
