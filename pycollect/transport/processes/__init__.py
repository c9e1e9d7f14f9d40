"""Worker processes of this machine, which share memory with the driver.

Driver's side: `engine`, `handle`, and the driver's end of `log`; `start` makes a `child`, which is
`spawned`, or `forked` by a template that `forking` asks. What runs there: `template`. Worker's
side: `serve`. Both: `wire`, values in the short messages of a mailbox.

Floor below: the files of `engines` itself.
Way of the data: request -> mailbox -> serve -> the driver's own slab; a note comes back.
"""

from __future__ import annotations
