"""Writes Hugging Face checkpoint files over old ones, as fast as memory is copied.

The files are the usual `model.safetensors` and `optimizer.pt`. `safetensors` and `torch.save` start with an empty
file, for which the kernel must find and clear memory page by page, and `torch.save` computes an unused checksum;
both take longer than the copy.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils

from grpo_orch.tasks.storing.tensors import type_name


class OverwrittenFile(io.FileIO):
    """A file that is overwritten from its start and truncated when it is closed.

    Writes go into existing pages, which is faster than a memory map with a fault for each page.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+")

    def write(self, data: Any) -> int:
        """Write all of `data`. One system call writes at most 2 GiB."""
        view, done = memoryview(data).cast("B"), 0
        while done < len(view):
            done += super().write(view[done:])
        return done

    def close(self) -> None:
        if not self.closed:
            self.truncate()
        super().close()


def save_tensors(
    tensors: dict[str, torch.Tensor], path: str | Path, metadata: dict[str, str] | None = None
) -> None:
    """Save dense tensors over an old file like `safetensors.torch.save_file`. Raises OSError, UnsupportedType."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    # The widest types first, so that each tensor is aligned, then by name, as in safetensors.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    at = 0
    for name, tensor in ordered:
        end = at + tensor.nbytes
        header[name] = {
            "dtype": type_name(name, tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with OverwrittenFile(Path(path)) as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for _, tensor in ordered:
            if tensor.nbytes:
                out.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def fits(save: Callable[[], None]) -> bool:
    """Run `save`; return False if its disk or memory is full. Raises whatever else `save` raises."""
    try:
        save()
    except Exception as error:
        if not _is_full(error):
            raise
        return False
    return True


def _is_full(error: BaseException | None) -> bool:
    """Whether an error means a full disk. torch wraps the system's error, and safetensors has it as text only."""
    while error is not None:
        if os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def overwriting() -> Iterator[None]:
    """Have `torch.save` to a path and transformers' saving of weights overwrite existing files."""
    save_object, save_file = torch.save, transformers.modeling_utils.safe_save_file
    checksums = torch.serialization.get_crc32_options()

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, str | os.PathLike):
            save_object(obj, f, *args, **kwargs)
            return
        with OverwrittenFile(Path(f)) as out:
            save_object(obj, out, *args, **kwargs)

    torch.save, transformers.modeling_utils.safe_save_file = save, save_tensors
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.save, transformers.modeling_utils.safe_save_file = save_object, save_file
        torch.serialization.set_crc32_options(checksums)
