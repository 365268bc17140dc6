"""Every arm of the benchmark by the name that tables show."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.checkpoint.staging import StagingOptions

from adacheck.tools.bench.adacheck_arm import AdacheckArm
from adacheck.tools.bench.arms import Arm, DcpAsyncSave, DcpSave, TorchSave


def _staging(*, background: bool) -> StagingOptions:
    """Staging into shared memory that is kept between steps; pinned memory and non-blocking copies exist with a GPU only."""
    return StagingOptions(use_pinned_memory=False, use_shared_memory=True, use_async_staging=background, use_non_blocking_copy=False)


ARMS: dict[str, Callable[[], Arm]] = {
    "none": Arm,
    "adacheck": AdacheckArm,
    "torch.save": TorchSave,
    "dcp.save": DcpSave,
    "dcp.async_save": DcpAsyncSave,
    "dcp.async_save, cached stager": lambda: DcpAsyncSave(_staging(background=False)),
    "dcp.async_save, asynchronous stager": lambda: DcpAsyncSave(_staging(background=True)),
}
"""Every arm under the name that tables show."""
