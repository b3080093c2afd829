"""Starts a trainer of many processes so many times: `python -m benchmarks.rig.rank_starts TIMES PROCESSES FOLDER`.

In the node's environment, over the tests' rig: a tiny model, a stand-in for the gateway. It prints the exit code
of each, and the end of the log of one that failed on stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path

import structlog

from tests.node.trainer.rig import make_tiny, open_rig

START_S = 900.0  # for a machine of two cores, on which eight processes import torch


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout has the exit codes alone
    count, processes, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    tiny = make_tiny(folder / "tiny")
    batch = {"max_steps": 1, "save_steps": 1, "per_device_train_batch_size": 1, "num_generations": processes}
    for at in range(count):
        with open_rig(folder / str(at), tiny, grpo=batch, accelerators=f"H100:{processes}") as rig:
            trainer = rig.start_ranks()
            try:
                code = trainer.wait(START_S)
            finally:
                trainer.kill()
            if code:
                print(rig.log().read_text()[-4000:], file=sys.stderr, flush=True)
        print(code, flush=True)


if __name__ == "__main__":
    main()
