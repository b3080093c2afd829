"""Exit codes of the project's processes, which identify the reason without reading a log."""

# Of commands; `orchestrator.cli.options` describes them.
OK = 0
FAILED = 1
USAGE = 2
TRIPPED = 3  # no other program uses this code, shells and Python included
HELD = 75
GAVE_UP = 79
INTERRUPTED = 130  # 128 + SIGINT

# Of the trainer and the nodes: docs/operations.md.

# sysexits.h EX_CONFIG: the configuration is wrong, and another try will not help.
BAD_SPEC = 78
# sysexits.h EX_UNAVAILABLE: the network, the store, the rollout nodes or a GPU failed. Another try may succeed.
UNAVAILABLE = 69
# The trainer met a newer trainer of its own run and stopped.
FENCED = 76
# The trainer's own detector has tripped: the run diverges.
DIVERGED = 77
# 128 + SIGTERM: the trainer was stopped, and its state is stored.
STOPPED = 143
# The trainer ran out of memory, the accelerator's or the machine's.
OUT_OF_MEMORY = 80
# None of the run's checkpoints can be restored. Starting over is the user's decision.
NO_INTACT_CHECKPOINT = 81
# The work cannot start on this machine: the user's setup fails, the driver fails where GPUs were requested, or a
# trainer finds too few GPUs. Until a trainer has trained with this run.yaml, a trainer's counts as BAD_SPEC.
# Rollout nodes' does after several in a row, if none has ever worked.
UNFIT_MACHINE = 82
# Training had no effect: no completion had a reward. Another try would not help.
NOTHING_LEARNT = 83
