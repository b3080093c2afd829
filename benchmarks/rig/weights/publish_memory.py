"""One of two processes that publish a model in FSDP2's shards, an adapter merged, and what memory that takes.

`python -m benchmarks.rig.weights.publish_memory PORT RANK FOLDER HOW`, in the node's environment. HOW is `each`:
one tensor at a time, as the trainer does; or `all`: with a copy of all of them, as it did before. The first
process says in JSON how large the weights are and how much more than before it held at most, in bytes.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
from accelerate import PartialState

from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.weights.tensors import ServedTypes
from grpo_orch.tasks.storing.publish import PolicyPublisher
from grpo_orch.tasks.storing.step_costs import StepCosts
from grpo_orch.tasks.storing.tensors import LazyTensor
from tests.node.ranks.divided import adapted, divided, join, publishing

SIZES = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5)


class Client:
    """The first process's, with a publisher into a store in a folder."""

    publishes_adapters = False

    def __init__(self, model: Any, folder: Path, how: str) -> None:
        config = model.get_base_model().config
        store = Store(f"file://{folder}/{how}/store")
        self._publisher = PolicyPublisher(
            store, config, folder / how / "weights", (0, 1, 1), ServedTypes(), StepCosts()
        )
        self._how = how

    def take_weights(self, weights: Iterator[tuple[str, LazyTensor]]) -> None:
        self._weights = weights

    def publish(self) -> None:
        CLEAR.write_text(RESET_PEAK)
        before_bytes = memory_bytes("VmRSS")
        tensors = dict(self._weights)
        weights_bytes = sum(one.dtype.itemsize * math.prod(one.shape) for one in tensors.values())
        if self._how == "all":
            tensors = {name: LazyTensor.of(one.read().to("cpu", copy=True)) for name, one in tensors.items()}
        self._publisher.publish(PolicyVersion(0, 0), tensors.items(), None)
        extra_bytes = memory_bytes("VmHWM") - before_bytes
        print(json.dumps({"weights_bytes": weights_bytes, "extra_bytes": extra_bytes}), flush=True)


def memory_bytes(what: str) -> int:
    """Of this process, as the kernel counts: VmRSS now, VmHWM at most."""
    found = re.search(rf"^{what}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    port, rank, folder, how = sys.argv[1:]
    join(port, rank)
    model = divided(adapted(SIZES))
    client = Client(model, Path(folder), how) if PartialState().is_main_process else None
    publishing(model, client).publish()


if __name__ == "__main__":
    main()
