"""Kills one of two processes that train, for each way to divide a model: `rank_kills SEED FOLDER [WAY ...]`.

In the node's environment, over the tests' rig: a tiny model, a stand-in for the gateway. It prints a line of JSON
for each, and what failed on stderr.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

import structlog

from tests.node.ranks.kills import WAYS, kill_one
from tests.node.trainer.rig import make_tiny

LIMIT_S = 900.0  # for a machine of two cores, on which DeepSpeed compiles what it needs


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout has the results alone
    seed, folder = int(sys.argv[1]), Path(sys.argv[2])
    tiny = make_tiny(folder / "tiny")
    for way in sys.argv[3:] or WAYS:
        try:
            said = asdict(kill_one(way, folder / way, tiny, seed, LIMIT_S))
        except AssertionError:
            traceback.print_exc()
            said = {"way": way, "seed": seed, "same_weights": False}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
