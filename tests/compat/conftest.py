"""TorchRL, imported before the tests need it, so that they leave the process as it was.

Its import makes "spawn" the way processes start and switches the checks of torch's distributions
off, for everything that runs afterwards.
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
