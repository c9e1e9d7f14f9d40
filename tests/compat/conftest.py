"""Import TorchRL early, and undo the side effects of its import.

The import sets the start method of processes to "spawn" and turns off the checks of torch's
distributions for the whole process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import warnings

from torch.distributions import Distribution

_start_method = multiprocessing.get_start_method(allow_none=True)
with contextlib.suppress(ImportError), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its extension fails to load on a newer torch
    import torchrl.collectors
    import torchrl.envs
    import torchrl.modules  # noqa: F401
multiprocessing.set_start_method(_start_method, force=True)
Distribution.set_default_validate_args(__debug__)
