"""Exit codes that cross a process boundary, so that no one has to read a log to know what happened."""

OK = 0
FAILED = 1
USAGE = 2
# `detect`: a run among those it was given diverged. Nothing else ends with it, shells and Python included.
TRIPPED = 3
# sysexits.h: the configuration is wrong, and running it again will not help.
BAD_SPEC = 78
# sysexits.h EX_UNAVAILABLE: the network, the store, the rollout nodes or a GPU failed. Another try may succeed.
UNAVAILABLE = 69
# sysexits.h EX_TEMPFAIL: somebody else holds the run.
HELD = 75
# The trainer met a newer trainer of its own run and stopped.
FENCED = 76
# The trainer's own guard has tripped: the run diverges.
DIVERGED = 77
# The run diverged again and again, and its budget of rollbacks is spent.
GAVE_UP = 79
# 128 and SIGTERM: the trainer was told to end, and what it had is stored.
STOPPED = 143
# The trainer ran out of memory, the accelerator's or the machine's.
OUT_OF_MEMORY = 80
# The run has checkpoints, and none of them can be restored: training anew from the start is a person's decision.
NO_INTACT_CHECKPOINT = 81
# The machine cannot begin: the user's set-up fails on it, or its driver where GPUs were asked for, or it shows a
# trainer too few of them. Unless a trainer has come as far as training with this run.yaml, its is as BAD_SPEC;
# rollout nodes' is, where none has ever worked, once several in a row have ended so.
UNFIT_MACHINE = 82
# Steps were trained, and none could teach anything: no completion had a reward. Another try would not, either.
NOTHING_LEARNT = 83
