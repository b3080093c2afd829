"""All processes of a trainer make completions together, where no rollout node is to be had."""

from __future__ import annotations

import time
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from policies.serving.wire import Completion
from tasks.completions.drought import Drought, Share
from tasks.machine.leaving import LeaveNow
from tasks.storing.heartbeat import Fenced
from tasks.trl.own_generation import OwnGeneration


class OwnShare:
    """What one process has for it. Each has the whole model.

    Args:
        drought: the first process's; None in the others.
        own: makes completions with this process's model.
    """

    def __init__(self, drought: Drought | None, own: OwnGeneration) -> None:
        self._drought, self._own = drought, own

    def make(self, accelerator: Any, *, training: bool) -> None:
        """Have each process make its part of the first one's share, and give it to that one. Raises Fenced."""
        began_s = time.monotonic()
        share = None if self._drought is None else self._drought.share(accelerator.num_processes)
        [share] = broadcast_object_list([share])
        assert share is not None
        made, why = self._part(share.of_process(accelerator.process_index, accelerator.num_processes))
        parts: list[tuple[list[Completion], str | None]] = gather_object([(made, why)])
        if self._drought is None:
            return
        everything = [one for part, _ in parts for one in part]
        self._drought.take(everything, time.monotonic() - began_s, training=training)
        whys = [why for _, why in parts if why is not None]
        if failed := [why for why in whys if why]:
            self._drought.cannot(failed[0])
        elif whys:
            self._drought.does_not_fit()

    def _part(self, share: Share) -> tuple[list[Completion], str | None]:
        """The completions, and None; or none and why: nothing said where they do not fit."""
        try:
            return self._own.complete(share.batch, share.begun).completions, None
        except LeaveNow:  # which the first process is told again before it asks for more
            return [], None
        except torch.OutOfMemoryError:
            return [], ""
        except Fenced:
            raise
        except Exception as error:  # noqa: BLE001  # the model's own code may raise anything
            return [], f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # what is trained needs it in other pieces
