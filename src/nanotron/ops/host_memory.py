"""Host memory that devices copy to and from at full speed."""

from __future__ import annotations

import weakref

import torch


def host_memory(size: int, kinds: set[str]) -> torch.Tensor:
    """``size`` bytes that devices of these kinds copy to without a detour, and no more than that.

    torch's own allocator of pinned memory rounds up to the next power of two, so CUDA is told of an ordinary buffer.
    """
    if "cuda" not in kinds or not size:
        return torch.empty(size, dtype=torch.uint8, pin_memory=bool(size and kinds - {"cpu"}))
    runtime, buffer = torch.cuda.cudart(), torch.empty(size, dtype=torch.uint8)  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), size, 0))
    weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())
    return buffer
