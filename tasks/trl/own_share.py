"""All processes of a trainer generate completions together while no rollout node is available."""

from __future__ import annotations

import time
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from grpo_orch.policies.serving.wire import Completion
from grpo_orch.tasks.completions.node_shortage import NodeShortage, Share
from grpo_orch.tasks.machine.leaving import LeaveNow
from grpo_orch.tasks.storing.heartbeat import Fenced
from grpo_orch.tasks.trl.own_generation import OwnGeneration


class OwnShare:
    """One process's part of it. Each process has the whole model.

    Args:
        drought: of the first process; None in the others.
        own: generates with this process's model.
    """

    def __init__(self, drought: NodeShortage | None, own: OwnGeneration) -> None:
        self._drought, self._own = drought, own

    def make(self, accelerator: Any, *, training: bool) -> None:
        """Generate this process's part of the first process's share, and gather the parts there. Raises Fenced."""
        began_s = time.monotonic()
        share = None if self._drought is None else self._drought.share(accelerator.num_processes)
        [share] = broadcast_object_list([share])
        assert share is not None
        completions, failure = self._part(share.of_process(accelerator.process_index, accelerator.num_processes))
        parts: list[tuple[list[Completion], str | None]] = gather_object([(completions, failure)])
        if self._drought is None:
            return
        gathered = [completion for part, _ in parts for completion in part]
        self._drought.take(gathered, time.monotonic() - began_s, training=training)
        failures = [failure for _, failure in parts if failure is not None]
        if errors := [failure for failure in failures if failure]:
            self._drought.record_failure(errors[0])
        elif failures:
            self._drought.halve_share()

    def _part(self, share: Share) -> tuple[list[Completion], str | None]:
        """Return the completions and None, or no completions and the error: empty if memory ran out."""
        try:
            return self._own.complete(share.batch, share.begun).completions, None
        except LeaveNow:  # raised again in the first process before its next request
            return [], None
        except torch.OutOfMemoryError:
            return [], ""
        except Fenced:
            raise
        except Exception as error:  # noqa: BLE001  # the model's own code may raise anything
            return [], f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # training needs other block sizes
