"""Runs of TRL's GRPOTrainer on small models, healthy and diverging: what detectors are judged by.

What a regime says of its run is what was expected before it was recorded. The labels in `tests/recordings` say
what a person saw: the step of the first bad update follows from the settings where they tell it (a reward that
breaks, a rate that leaves the usual range, 4e-4, or 4e-3 for adapters), else from the plots. Six runs of which
nobody could say from their rows whether to stop them have no label and are left out: endless, endless-log5,
form-hack, kl-far-no-penalty, lora-kl-strong, sampler-hot. Two that were meant to diverge did not:
entropy-up-slowly, length-hack-slow. Of the runs in `held_out` all are there.
"""
