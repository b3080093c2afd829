"""How long new weights take from the optimizer's step until an engine may take them, by their form.

By the arithmetic of docs/benchmarks.md (Weights), with its rates: `send` and `fetch` are a transfer each, for
nodes read what the trainer wrote into the store; a delta is found by going through all weights.
"""

from __future__ import annotations

import math

GB = 10**9
LINKS_GBIT_PER_S = (10, 25, 100)
# Measured (docs/benchmarks.md), one core; its arithmetic has 8 of them on each side.
ENCODE_BYTES_PER_S = 1.0 * GB
PROVE_BYTES_PER_S = 2.0 * GB
CORES = 8
# Measured there: learning rate, bytes of a delta as a share of the whole, AdamW with float32 masters.
DELTAS = ((5e-7, 0.0106), (1e-6, 0.0178), (1e-5, 0.097))


def delta_share(learning_rate: float) -> float:
    """Bytes of a delta of bfloat16 weights as a share of the whole, at most 1.

    Between measured learning rates, and beyond them, by the power that joins the two nearest.
    """
    if learning_rate <= 0:
        return 0.0
    upper = next((at for at in range(1, len(DELTAS)) if learning_rate <= DELTAS[at][0]), len(DELTAS) - 1)
    (rate, share), (next_rate, next_share) = DELTAS[upper - 1], DELTAS[upper]
    power = math.log(next_share / share) / math.log(next_rate / rate)
    return min(1.0, share * float((learning_rate / rate) ** power))


def whole_s(weights_bytes: float, gbit_per_s: float) -> float:
    """Seconds for all of it, an adapter's file too: encode, send, fetch, prove."""
    encode_s, prove_s = _encode_s(weights_bytes), weights_bytes / (CORES * PROVE_BYTES_PER_S)
    return encode_s + 2 * _link_s(weights_bytes, gbit_per_s) + prove_s


def delta_s(weights_bytes: float, share: float, gbit_per_s: float) -> float:
    """Seconds for what changed: sent while it is encoded, fetched, applied to all of the weights and proved."""
    send_s, apply_s = _link_s(share * weights_bytes, gbit_per_s), weights_bytes / (CORES * PROVE_BYTES_PER_S)
    return max(_encode_s(weights_bytes), send_s) + send_s + apply_s


def _encode_s(weights_bytes: float) -> float:
    return weights_bytes / (CORES * ENCODE_BYTES_PER_S)


def _link_s(size_bytes: float, gbit_per_s: float) -> float:
    return size_bytes / (gbit_per_s * GB / 8)
