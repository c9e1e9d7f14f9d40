"""Public collectors: signatures, checks of arguments, and the objects that they are made of.

This code runs in the program that calls the collector.

Layers below: `compat` (TorchRL's names) and `driver`.
"""

from __future__ import annotations
